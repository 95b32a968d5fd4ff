"""Device memory that blocks of a kernel leave things for each other in: partial results, and how many have arrived."""

from __future__ import annotations

from edgellm_worker.engine.runtime.cuda import Cuda


class Scratch:
    """Shared by the calls prepared for a stream, which run one at a time. Addresses stay: captured graphs hold them."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._kept: list[tuple[int, int, int]] = []

    def place(self, num_bytes: int) -> int:
        """-> at least so many bytes, zeros at first."""
        stream = int(self._cuda.stream)
        for its_stream, size, pointer in self._kept:
            if its_stream == stream and size >= num_bytes:
                return pointer
        self._kept.append((stream, num_bytes, self._cuda.allocate(num_bytes, zero=True)))
        return self._kept[-1][2]
