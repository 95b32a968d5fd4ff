"""What programs need of a GPU when nothing is to run: addresses, and a note of every kernel launch."""

from __future__ import annotations

from collections.abc import Callable

from edgellm_worker.engine.checkpoint.weights import Array


class RecordedKernel:
    def __init__(self, signature: str) -> None:
        self.signature = signature


class RecordedModule:
    def kernel(self, _name: str, signature: str, _shared_bytes: int = 0) -> RecordedKernel:
        return RecordedKernel(signature)


class RecordingDevice:
    """Addresses are distinct and mean nothing. `launched`: (signature, arguments) of each launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[float, ...]]] = []
        self._next = 1 << 20

    def allocate(self, num_bytes: int, *, zero: bool = False) -> int:
        del zero
        self._next += -(-num_bytes // 256) * 256
        return self._next

    def upload(self, array: Array) -> int:
        return self.allocate(array.nbytes)

    def compile(self, _name: str, _macros: dict[str, int]) -> RecordedModule:
        return RecordedModule()

    def resident_blocks(self, _kernel: RecordedKernel, _threads: int) -> int:
        return 1

    def run(
        self, kernel: RecordedKernel, _grid: tuple[int, int, int], _threads: int, arguments: tuple[float, ...]
    ) -> None:
        self.launched.append((kernel.signature, tuple(arguments)))


class NoNetworks:
    def prepare(self, *_arguments: object) -> Callable[[], None]:
        return lambda: None
