"""The machine's memory. On unified memory (Jetson, DGX Spark) this is the GPU's memory too.

MemAvailable is what can be had without swapping; MemFree and cudaMemGetInfo leave the page cache out and mislead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source
from edgellm_worker.telemetry.sysfs import read_text

KINDS: Final = {"MemTotal": "host_total", "MemAvailable": "host_available"}


class MemoryReader:
    source: Final = Source.MEMORY

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._path = proc / "meminfo"

    def read(self) -> Sequence[Sample]:
        lines = (line.split() for line in (read_text(self._path) or "").splitlines())
        return [
            Sample(Quantity.MEMORY_BYTES, KINDS[words[0].rstrip(":")], float(words[1]) * 1024)
            for words in lines
            if len(words) == 3 and words[0].rstrip(":") in KINDS
        ]
