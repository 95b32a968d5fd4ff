"""Is the device holding its clocks back, and why?

Two witnesses. Cooling devices of type `<unit>-throttle-alert` leave state 0 while the SoC throttles that unit for heat.
The hwmon chip `soctherm_oc` counts electrical events; a count that rose since the last reading means throttled since.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source
from edgellm_worker.telemetry.sysfs import children, read_number, read_text

ALERT: Final = "-throttle-alert"
EVENT_COUNTERS: Final = {
    "oc1_event_cnt": "undervoltage",
    "oc2_event_cnt": "overcurrent_average",
    "oc3_event_cnt": "overcurrent_peak",
}
"""NVIDIA Jetson Linux Developer Guide, Orin series, "over-current event counters"."""


class ThrottleReader:
    source: Final = Source.THROTTLE

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._class = sys / "class"
        self._counts: dict[str, float] = {}

    def read(self) -> Sequence[Sample]:
        return [
            Sample(Quantity.THROTTLED, cause, float(on)) for cause, on in (self._heat() | self._electrical()).items()
        ]

    def _heat(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for device in children(self._class / "thermal", "cooling_device*"):
            kind = read_text(device / "type") or ""
            state = read_number(device / "cur_state")
            if kind.endswith(ALERT) and state is not None:
                found[f"heat_{kind.removesuffix(ALERT)}"] = state > 0
        return found

    def _electrical(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for chip in children(self._class / "hwmon", "hwmon*"):
            if read_text(chip / "name") != "soctherm_oc":
                continue
            for counter, cause in EVENT_COUNTERS.items():
                count = read_number(chip / counter)
                if count is not None:
                    found[cause] = count > self._counts.get(cause, count)
                    self._counts[cause] = count
        return found
