"""Temperatures from the kernel's thermal zones, by the zone's type.

A power-gated GPU answers EAGAIN, or -256 degrees on some releases: both mean "no reading".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source
from edgellm_worker.telemetry.sysfs import children, read_number, read_text

GATED_BELOW_CELSIUS: Final = -100.0


class ThermalReader:
    source: Final = Source.THERMAL

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._root = sys / "class" / "thermal"

    def read(self) -> Sequence[Sample]:
        found: dict[str, float] = {}
        for zone in children(self._root, "thermal_zone*"):
            kind = read_text(zone / "type")
            millidegrees = read_number(zone / "temp")
            if not kind or millidegrees is None or millidegrees / 1000 < GATED_BELOW_CELSIUS:
                continue
            name = kind.removesuffix("-thermal")
            # Several zones may carry one type (ACPI): the hottest speaks for them.
            found[name] = max(millidegrees / 1000, found.get(name, GATED_BELOW_CELSIUS))
        return [Sample(Quantity.TEMPERATURE_CELSIUS, name, celsius) for name, celsius in found.items()]
