"""All sources of this machine, read together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgellm_worker.telemetry.devfreq import DevfreqReader
from edgellm_worker.telemetry.energy import EnergyMeter
from edgellm_worker.telemetry.hwmon import TOTAL, HwmonReader
from edgellm_worker.telemetry.memory import MemoryReader
from edgellm_worker.telemetry.nvml import nvml_reader
from edgellm_worker.telemetry.nvpmodel import NvpmodelReader
from edgellm_worker.telemetry.reading import Quantity, Reader, Sample, Source, TelemetryReading
from edgellm_worker.telemetry.thermal import ThermalReader
from edgellm_worker.telemetry.throttle import ThrottleReader

_NVML_PREFIX: Final = "gpu"


class Telemetry:
    """`read` takes some milliseconds (sensors behind I2C): call it from a thread, every few seconds."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = tuple(readers)
        self._meter = EnergyMeter()

    @classmethod
    def of_this_machine(cls, root: Path = Path("/")) -> Telemetry:
        sys = root / "sys"
        readers: list[Reader] = [
            HwmonReader(sys),
            ThermalReader(sys),
            DevfreqReader(sys),
            ThrottleReader(sys),
            NvpmodelReader(root),
            MemoryReader(root / "proc"),
        ]
        nvml = nvml_reader()
        return cls([*readers, nvml] if nvml is not None else readers)

    def read(self, now_s: float) -> TelemetryReading:
        """`now_s` is monotonic seconds."""
        samples: list[Sample] = []
        available = dict.fromkeys(Source, False)
        for reader in self._readers:
            found = reader.read()
            available[reader.source] = bool(found)
            samples.extend(found)
        self._meter.add(now_s, _total_watts(samples))
        return TelemetryReading(tuple(samples), available, self._meter.total_j)


def _total_watts(samples: Sequence[Sample]) -> float | None:
    """The board's input where it is measured, else the GPUs' own draw, else unknown."""
    powers = {sample.name: sample.value for sample in samples if sample.quantity is Quantity.POWER_WATTS}
    if TOTAL in powers:
        return powers[TOTAL]
    gpus = [watts for name, watts in powers.items() if name.startswith(_NVML_PREFIX)]
    return sum(gpus) if gpus else None
