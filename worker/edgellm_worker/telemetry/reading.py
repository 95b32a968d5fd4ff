"""The values that readers hand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Source(StrEnum):
    """Where samples come from (label `source` of `telemetry_available`)."""

    HWMON = "hwmon"  # power rails
    THERMAL = "thermal"  # thermal zones
    DEVFREQ = "devfreq"  # clocks and load of a Jetson's GPU and memory
    THROTTLE = "throttle"  # throttle alerts and over-current counters
    NVPMODEL = "nvpmodel"  # the power mode
    MEMORY = "memory"  # /proc/meminfo
    NVML = "nvml"  # the NVIDIA driver's own library


class Quantity(StrEnum):
    """What a sample measures; the unit is part of the value's meaning."""

    POWER_WATTS = "power_watts"
    TEMPERATURE_CELSIUS = "temperature_celsius"
    UTILIZATION_RATIO = "utilization_ratio"
    CLOCK_HERTZ = "clock_hertz"
    THROTTLED = "throttled"  # 0 or 1
    MEMORY_BYTES = "memory_bytes"
    POWER_MODE = "power_mode"  # always 1; the name is the mode's


@dataclass(frozen=True, slots=True)
class Sample:
    """`name` tells samples of one quantity apart: the rail, sensor, unit, domain, cause, kind or mode."""

    quantity: Quantity
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class TelemetryReading:
    """One round over all sources.

    energy_j  joules since the first reading, or None while no power was ever read
    """

    samples: tuple[Sample, ...]
    available: Mapping[Source, bool]
    energy_j: float | None

    def of(self, quantity: Quantity) -> dict[str, float]:
        return {sample.name: sample.value for sample in self.samples if sample.quantity is quantity}


class Reader(Protocol):
    """One source. `read` never raises for a missing or unreadable node: it leaves the sample out."""

    @property
    def source(self) -> Source: ...

    def read(self) -> Sequence[Sample]: ...
