"""Clocks and load of a Jetson's GPU and memory from devfreq.

Orin names its GPU by address (`17000000.gpu`; `.ga10b` on JetPack 5) and has a `load` in per mille beside the device;
Thor names its domains (`gpu-gpc-0`, `gpu-nvd-0`) and has no load there (NVML has it). `bwmgr` is the memory controller.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source
from edgellm_worker.telemetry.sysfs import children, read_number

DOMAINS: Final = (
    (re.compile(r"^[0-9a-f]+\.(gpu|ga10b|gv11b)$"), "gpu"),
    (re.compile(r"^gpu-(gpc|nvd)-(\d+)$"), r"\1\2"),
    (re.compile(r"^(.*\.emc|bwmgr)$"), "memory"),
)
"""devfreq entry -> clock domain. Entries that match none (video, camera) are not of interest."""


class DevfreqReader:
    source: Final = Source.DEVFREQ

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._root = sys / "class" / "devfreq"

    def read(self) -> Sequence[Sample]:
        samples: list[Sample] = []
        for entry in children(self._root, "*"):
            domain = _domain(entry.name)
            if domain is None:
                continue
            hertz = read_number(entry / "cur_freq")
            if hertz is not None:
                samples.append(Sample(Quantity.CLOCK_HERTZ, domain, hertz))
            per_mille = read_number(entry / "device" / "load")
            if per_mille is not None:
                samples.append(Sample(Quantity.UTILIZATION_RATIO, domain, per_mille / 1000))
        return samples


def _domain(name: str) -> str | None:
    for pattern, domain in DOMAINS:
        match = pattern.match(name)
        if match:
            return match.expand(domain)
    return None
