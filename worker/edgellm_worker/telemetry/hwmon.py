"""Power rails from hwmon: the INA monitors of Jetson modules and carrier boards.

Units are the kernel's hwmon ABI (Documentation/hwmon/sysfs-interface): in*_input in millivolts, curr*_input in
milliamperes, power*_input in microwatts. Of an INA3221 only channels with both a label and a current are rails: the
others are shunt voltages and their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source
from edgellm_worker.telemetry.sysfs import children, read_number, read_text

CHIPS: Final[dict[str, str | None]] = {"ina3221": None, "ina226": None, "ina238": "VIN"}
"""hwmon `name` -> the rail's name when the chip has no label (Thor's carrier board measures its input so)."""

NOT_CONNECTED: Final = "NC"

TOTALS: Final = (
    ("VIN",),
    ("VDD_IN",),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
)
"""Rails that together are the whole: the board's input where it is measured, else the module's. The first row whose
rails are all present counts: AGX Thor, Orin NX and Nano, Thor module, AGX Orin module."""

TOTAL: Final = "total"


class HwmonReader:
    source: Final = Source.HWMON

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._root = sys / "class" / "hwmon"

    def read(self) -> Sequence[Sample]:
        rails: dict[str, float] = {}
        for chip in children(self._root, "hwmon*"):
            name = read_text(chip / "name")
            if name in CHIPS:
                rails.update(_rails(chip, CHIPS[name]))
        whole = next((row for row in TOTALS if all(rail in rails for rail in row)), None)
        if whole is not None:
            rails[TOTAL] = sum(rails[rail] for rail in whole)
        return [Sample(Quantity.POWER_WATTS, rail, watts) for rail, watts in rails.items()]


def _rails(chip: Path, unlabelled: str | None) -> dict[str, float]:
    labels = {path.name.removeprefix("in").removesuffix("_label"): path for path in children(chip, "in*_label")}
    named = {channel: read_text(path) for channel, path in labels.items()}
    if not named:
        named = {"1": read_text(chip / "label") or unlabelled}
    found: dict[str, float] = {}
    for channel, rail in named.items():
        watts = _watts(chip, channel)
        if rail and rail != NOT_CONNECTED and watts is not None:
            found[rail] = watts
    return found


def _watts(chip: Path, channel: str) -> float | None:
    if read_number(chip / f"in{channel}_enable") == 0:
        return None
    microwatts = read_number(chip / f"power{channel}_input")
    if microwatts is not None:
        return microwatts / 1e6
    millivolts = read_number(chip / f"in{channel}_input")
    milliamperes = read_number(chip / f"curr{channel}_input")
    if millivolts is None or milliamperes is None:
        return None
    return millivolts * milliamperes / 1e6
