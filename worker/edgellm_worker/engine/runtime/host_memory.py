"""What the host can still give, for a GPU that has no memory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO) -> int:
    """The kernel's estimate of what it can give without swapping: what is free, and file pages that it would drop. 0
    where it does not say.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else 0
