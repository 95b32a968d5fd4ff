"""The Jetson's power mode, from the file that nvpmodel keeps (`pmode:0002`) and the names in its configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source
from edgellm_worker.telemetry.sysfs import read_text

_STATUS: Final = re.compile(r"\bpmode:(\d+)")
_MODEL: Final = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>")


class NvpmodelReader:
    source: Final = Source.NVPMODEL

    def __init__(self, root: Path = Path("/")) -> None:
        self._status = root / "var" / "lib" / "nvpmodel" / "status"
        self._configuration = root / "etc" / "nvpmodel.conf"

    def read(self) -> Sequence[Sample]:
        status = _STATUS.search(read_text(self._status) or "")
        if status is None:
            return []
        number = int(status.group(1))
        names = {int(ident): name for ident, name in _MODEL.findall(read_text(self._configuration) or "")}
        return [Sample(Quantity.POWER_MODE, names.get(number, f"mode_{number}"), 1.0)]
