"""NVIDIA's management library (package nvidia-ml-py), for discrete GPUs and the integrated ones it knows.

A GPU answers NOT_SUPPORTED for what it does not measure, a Jetson for most of it: each value is asked for alone and
left out when refused. Values are read per GPU and named `gpu<index>`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgellm_worker.telemetry.reading import Quantity, Sample, Source

# Bits of nvmlClocksEventReasons (nvml.h) that mean the device is held back, not idle or told so by an application.
THROTTLE_BITS: Final = {
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "heat_software": 0x20,
    "heat_hardware": 0x40,
    "power_brake": 0x80,
}


@dataclass(frozen=True, slots=True)
class _Question:
    """`ask(library, handle)` gives (suffix of the name, value) pairs, already in the quantity's unit."""

    quantity: Quantity
    ask: Callable[[Any, Any], Sequence[tuple[str, float]]]


def _memory(library: Any, handle: Any) -> Sequence[tuple[str, float]]:
    info = library.nvmlDeviceGetMemoryInfo(handle)
    return (("_total", float(info.total)), ("_available", float(info.free)))


def _throttled(library: Any, handle: Any) -> Sequence[tuple[str, float]]:
    reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return [(f"_{cause}", float(bool(reasons & bit))) for cause, bit in THROTTLE_BITS.items()]


QUESTIONS: Final = (
    _Question(Quantity.POWER_WATTS, lambda lib, h: [("", lib.nvmlDeviceGetPowerUsage(h) / 1000)]),
    _Question(Quantity.TEMPERATURE_CELSIUS, lambda lib, h: [("", float(lib.nvmlDeviceGetTemperature(h, 0)))]),
    _Question(Quantity.UTILIZATION_RATIO, lambda lib, h: [("", lib.nvmlDeviceGetUtilizationRates(h).gpu / 100)]),
    _Question(Quantity.CLOCK_HERTZ, lambda lib, h: [("", lib.nvmlDeviceGetClockInfo(h, 0) * 1e6)]),
    _Question(Quantity.CLOCK_HERTZ, lambda lib, h: [("_memory", lib.nvmlDeviceGetClockInfo(h, 2) * 1e6)]),
    _Question(Quantity.MEMORY_BYTES, _memory),
    _Question(Quantity.THROTTLED, _throttled),
)
"""Sensor 0 is the die, clock 0 graphics, clock 2 memory (nvml.h)."""


class NvmlReader:
    source: Final = Source.NVML

    def __init__(self, library: Any) -> None:
        """`library` is the initialised module `pynvml`, or anything with its functions and `NVMLError`."""
        self._library = library

    def read(self) -> Sequence[Sample]:
        return [sample for index, handle in self._handles() for sample in self._samples(f"gpu{index}", handle)]

    def _handles(self) -> Iterator[tuple[int, Any]]:
        try:
            for index in range(self._library.nvmlDeviceGetCount()):
                yield index, self._library.nvmlDeviceGetHandleByIndex(index)
        except self._library.NVMLError:
            return

    def _samples(self, gpu: str, handle: Any) -> Iterator[Sample]:
        for question in QUESTIONS:
            try:
                answers = question.ask(self._library, handle)
            except self._library.NVMLError:
                continue
            for suffix, value in answers:
                yield Sample(question.quantity, gpu + suffix, value)


def nvml_reader() -> NvmlReader | None:
    """A reader where the package and a driver are present, else None."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return NvmlReader(library)
