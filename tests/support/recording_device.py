"""What programs need of a GPU when nothing is to run: addresses, and a note of every kernel launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgellm_worker.engine.checkpoint.weights import Array


class RecordedKernel:
    def __init__(self, signature: str, macros: dict[str, int], shared_bytes: int) -> None:
        self.signature = signature
        self.macros = macros
        self.shared_bytes = shared_bytes


class RecordedModule:
    def __init__(self, device: RecordingDevice, macros: dict[str, int]) -> None:
        self._device = device
        self._macros = macros

    def kernel(self, name: str, signature: str, shared_bytes: int = 0) -> RecordedKernel:
        kernel = RecordedKernel(signature, self._macros, shared_bytes)
        self._device.kernels[name] = kernel
        return kernel


class RecordingDevice:
    """Addresses are distinct and mean nothing. `launched`: (signature, arguments) of each launch; `kernels`: the last that
    was made of each name.
    """

    def __init__(self, block_shared_bytes: int = 99 << 10) -> None:
        self.block_shared_bytes = block_shared_bytes
        self.has_clusters = False
        self.num_multiprocessors = 132
        self.kernels: dict[str, RecordedKernel] = {}
        self.launched: list[tuple[str, tuple[float, ...]]] = []
        self.stream = 0
        self._num_streams = 1
        self._next = 1 << 20

    def new_stream(self) -> int:
        self._num_streams += 1
        return self._num_streams - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        usual, self.stream = self.stream, stream
        yield
        self.stream = usual

    def event(self) -> IdleEvent:
        return IdleEvent()

    def allocate(self, num_bytes: int, *, zero: bool = False) -> int:
        del zero
        self._next += -(-num_bytes // 256) * 256
        return self._next

    def upload(self, array: Array) -> int:
        return self.allocate(array.nbytes)

    def compile(self, _name: str, macros: dict[str, int]) -> RecordedModule:
        return RecordedModule(self, macros)

    def resident_blocks(self, _kernel: RecordedKernel, _threads: int) -> int:
        return 1

    def run(
        self,
        kernel: RecordedKernel,
        _grid: tuple[int, int, int],
        _threads: int,
        arguments: tuple[float, ...],
        *,
        is_cluster: bool = False,
    ) -> None:
        del is_cluster
        self.launched.append((kernel.signature, tuple(arguments)))


class IdleEvent:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def is_over(self) -> bool:
        return True

    def hold_back(self) -> None:
        pass

    def seconds_since(self, _earlier: IdleEvent) -> float:
        return 0.0


class NoNetworks:
    def prepare(self, *_arguments: object) -> Callable[[], None]:
        return lambda: None
