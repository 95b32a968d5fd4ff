"""A GPU that counts what an executor allocates on it, and runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array, Weight
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from tests.support.recording_device import NoNetworks, RecordedKernel, RecordingDevice

LARGE_GPU = 132  # multiprocessors


class MeteredDevice(RecordingDevice):
    """`allocated` bytes, all that was asked for. Of a large GPU: two blocks of any kernel on each multiprocessor."""

    def __init__(self) -> None:
        super().__init__(227 << 10)
        self.allocated = 0

    def allocate(self, num_bytes: int, *, zero: bool = False) -> int:
        self.allocated += num_bytes
        return super().allocate(num_bytes, zero=zero)

    def resident_blocks(self, _kernel: RecordedKernel, _threads: int) -> int:
        return 2 * LARGE_GPU

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def upload_async(self, _pinned: Array, _pointer: int) -> None:
        pass

    def download_async(self, _pointer: int, _pinned: Array) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capture(self, _record: Callable[[], None]) -> IdleGraph:
        return IdleGraph()

    def run(self, *_launch: object, **_how: object) -> None:
        pass


class IdleGraph:
    def launch(self) -> None:
        pass


class ClosableNetworks(NoNetworks):
    def close(self) -> None:
        pass


class WeightlessStore(WeightStore):
    """Of a model too large to make: weights have addresses and take no room."""

    def _once(self, key: tuple[object, ...], weights: tuple[Weight, ...], make: Callable[[], Array]) -> int:
        del key, weights, make
        return 4096
