"""NVML on a real GPU."""

from __future__ import annotations

import time

import pytest

from edgellm_worker.telemetry import Quantity, Source, Telemetry

pytestmark = pytest.mark.gpu


def test_a_real_gpu_answers_power_heat_clock_and_memory():
    pytest.importorskip("pynvml")
    telemetry = Telemetry.of_this_machine()
    telemetry.read(time.monotonic())
    time.sleep(0.2)
    reading = telemetry.read(time.monotonic())
    assert reading.available[Source.NVML]
    assert 5 < reading.of(Quantity.POWER_WATTS)["gpu0"] < 2000
    assert 0 < reading.of(Quantity.TEMPERATURE_CELSIUS)["gpu0"] < 120
    assert reading.of(Quantity.CLOCK_HERTZ)["gpu0"] > 1e8
    memory = reading.of(Quantity.MEMORY_BYTES)
    assert 0 < memory["gpu0_available"] <= memory["gpu0_total"]
    assert reading.energy_j is not None
    assert reading.energy_j > 0
