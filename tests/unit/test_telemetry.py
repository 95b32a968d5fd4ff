"""Telemetry on the device trees of three boards, on a machine with nothing, and on an NVML that refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from edgellm_worker.telemetry import Quantity, Source, Telemetry, TelemetryReading
from edgellm_worker.telemetry.devfreq import DevfreqReader
from edgellm_worker.telemetry.energy import MAX_GAP_S, EnergyMeter
from edgellm_worker.telemetry.hwmon import HwmonReader
from edgellm_worker.telemetry.memory import MemoryReader
from edgellm_worker.telemetry.nvml import THROTTLE_BITS, NvmlReader
from edgellm_worker.telemetry.nvpmodel import NvpmodelReader
from edgellm_worker.telemetry.thermal import ThermalReader
from edgellm_worker.telemetry.throttle import ThrottleReader
from tests.support.device_tree import lay_out

SYSFS = (Source.HWMON, Source.THERMAL, Source.DEVFREQ, Source.THROTTLE, Source.NVPMODEL, Source.MEMORY)


def telemetry_at(root: Path) -> Telemetry:
    sys = root / "sys"
    return Telemetry(
        [
            HwmonReader(sys),
            ThermalReader(sys),
            DevfreqReader(sys),
            ThrottleReader(sys),
            NvpmodelReader(root),
            MemoryReader(root / "proc"),
        ]
    )


@pytest.fixture
def orin(tmp_path: Path) -> TelemetryReading:
    return telemetry_at(lay_out("agx_orin", tmp_path)).read(0.0)


@pytest.fixture
def thor(tmp_path: Path) -> TelemetryReading:
    return telemetry_at(lay_out("agx_thor", tmp_path)).read(0.0)


@pytest.mark.parametrize("board", ["agx_orin", "agx_thor"])
def test_every_source_of_a_board_is_available(board: str, tmp_path: Path):
    available = telemetry_at(lay_out(board, tmp_path)).read(0.0).available
    assert {source for source, is_there in available.items() if is_there} == set(SYSFS)


def test_orin_rails_are_milliwatts_of_labelled_channels_only(orin: TelemetryReading):
    watts = orin.of(Quantity.POWER_WATTS)
    assert watts.keys() == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO", "total"}
    assert watts["VDD_GPU_SOC"] == pytest.approx(19.064 * 0.560)
    # VDDQ is fed from VIN_SYS_5V0: adding it would count it twice.
    assert watts["total"] == pytest.approx(19.064 * 0.560 + 19.072 * 0.256 + 4.984 * 0.904)


def test_thor_total_is_the_carrier_boards_input(thor: TelemetryReading):
    watts = thor.of(Quantity.POWER_WATTS)
    assert watts.keys() == {"VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0", "VIN", "total"}
    assert watts["VIN"] == pytest.approx(71.422)
    assert watts["total"] == watts["VIN"]


def test_nano_total_is_vdd_in(tmp_path: Path):
    watts = telemetry_at(lay_out("orin_nano", tmp_path)).read(0.0).of(Quantity.POWER_WATTS)
    assert watts["total"] == watts["VDD_IN"] == pytest.approx(4.984 * 1.856)


def test_a_disabled_channel_and_an_unreadable_current_are_no_rails(tmp_path: Path):
    chip = lay_out("orin_nano", tmp_path) / "sys/class/hwmon/hwmon1"
    (chip / "in2_enable").write_text("0\n")
    (chip / "curr3_input").unlink()
    assert telemetry_at(tmp_path).read(0.0).of(Quantity.POWER_WATTS).keys() == {"VDD_IN", "total"}


def test_gated_zones_are_absent_not_zero(orin: TelemetryReading, tmp_path: Path):
    celsius = orin.of(Quantity.TEMPERATURE_CELSIUS)
    assert celsius.keys() == {"cpu", "gpu", "soc0", "soc1", "soc2", "tj"}
    assert celsius["tj"] == pytest.approx(47.906)


def test_thor_gpu_zone_comes_back_when_the_gpu_wakes(tmp_path: Path):
    telemetry = telemetry_at(lay_out("agx_thor", tmp_path))
    assert "gpu" not in telemetry.read(0.0).of(Quantity.TEMPERATURE_CELSIUS)
    zone = tmp_path / "sys/class/thermal/thermal_zone1/temp"
    zone.rmdir()
    zone.write_text("84812\n")
    assert telemetry.read(1.0).of(Quantity.TEMPERATURE_CELSIUS)["gpu"] == pytest.approx(84.812)


def test_clocks_by_domain(orin: TelemetryReading, tmp_path: Path):
    assert orin.of(Quantity.CLOCK_HERTZ) == {"gpu": 918e6, "memory": 3199e6}
    assert orin.of(Quantity.UTILIZATION_RATIO) == {"gpu": 0.734}


def test_thor_clocks_without_load(thor: TelemetryReading):
    assert thor.of(Quantity.CLOCK_HERTZ) == {"gpc0": 1575e6, "nvd0": 1692e6, "memory": 4266e6}
    assert thor.of(Quantity.UTILIZATION_RATIO) == {}


def test_an_idle_gpu_reads_zero_because_it_said_so(tmp_path: Path):
    reading = telemetry_at(lay_out("orin_nano", tmp_path)).read(0.0)
    assert reading.of(Quantity.UTILIZATION_RATIO) == {"gpu": 0.0}


def test_heat_alert_throttles_its_unit_only(tmp_path: Path):
    throttled = telemetry_at(lay_out("orin_nano", tmp_path)).read(0.0).of(Quantity.THROTTLED)
    assert throttled == {"heat_gpu": 1.0, "heat_cpu": 0.0}


def test_electrical_events_count_from_the_first_reading(tmp_path: Path):
    telemetry = telemetry_at(lay_out("agx_thor", tmp_path))
    counter = tmp_path / "sys/class/hwmon/hwmon5/oc3_event_cnt"
    seen = []
    for count in (179, 180, 180):
        counter.write_text(f"{count}\n")
        seen.append(telemetry.read(0.0).of(Quantity.THROTTLED)["overcurrent_peak"])
    assert seen == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("board", "mode"), [("agx_orin", "MAXN"), ("agx_thor", "120W"), ("orin_nano", "mode_1")])
def test_power_mode_by_name_else_by_number(board: str, mode: str, tmp_path: Path):
    assert telemetry_at(lay_out(board, tmp_path)).read(0.0).of(Quantity.POWER_MODE) == {mode: 1.0}


def test_memory_is_mem_available(orin: TelemetryReading):
    assert orin.of(Quantity.MEMORY_BYTES) == {"host_total": 64349168 * 1024, "host_available": 31886996 * 1024}


def test_a_machine_without_any_node_reports_every_source_missing(tmp_path: Path):
    reading = telemetry_at(tmp_path).read(0.0)
    assert reading.samples == ()
    assert reading.available == dict.fromkeys(Source, False)
    assert reading.energy_j is None


def test_garbage_in_a_node_is_no_reading(tmp_path: Path):
    root = lay_out("orin_nano", tmp_path)
    (root / "sys/class/thermal/thermal_zone1/temp").write_text("n/a\n")
    (root / "var/lib/nvpmodel/status").write_text("\n")
    reading = telemetry_at(root).read(0.0)
    assert "cpu" not in reading.of(Quantity.TEMPERATURE_CELSIUS)
    assert not reading.available[Source.NVPMODEL]


def test_energy_is_the_integral_of_total_power(tmp_path: Path):
    telemetry = telemetry_at(lay_out("agx_thor", tmp_path))
    assert telemetry.read(100.0).energy_j == 0.0
    assert telemetry.read(110.0).energy_j == pytest.approx(714.22)


def test_energy_meter_skips_gaps_and_silence():
    meter = EnergyMeter()
    meter.add(0.0, None)
    assert meter.total_j is None
    meter.add(1.0, 10.0)
    meter.add(3.0, 20.0)
    assert meter.total_j == pytest.approx(30.0)
    meter.add(4.0 + MAX_GAP_S, 20.0)
    assert meter.total_j == pytest.approx(30.0)
    meter.add(5.0 + MAX_GAP_S, 20.0)
    assert meter.total_j == pytest.approx(50.0)


class NVMLError(Exception):
    pass


class RecordedNvml:
    """The functions of pynvml for the values given; every other question is NOT_SUPPORTED."""

    NVMLError = NVMLError

    def __init__(self, **answers: object) -> None:
        self._answers = answers

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def __getattr__(self, name: str):
        def ask(*_: object) -> object:
            if name not in self._answers:
                raise NVMLError(name)
            return self._answers[name]

        return ask


def test_nvml_reads_what_the_gpu_answers():
    library = RecordedNvml(
        nvmlDeviceGetPowerUsage=121_500,
        nvmlDeviceGetTemperature=61,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=87, memory=40),
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetMemoryInfo=SimpleNamespace(total=1000, free=400, used=600),
        nvmlDeviceGetCurrentClocksThrottleReasons=THROTTLE_BITS["power_cap"] | 0x1,
    )
    telemetry = Telemetry([NvmlReader(library)])
    telemetry.read(0.0)
    reading = telemetry.read(2.0)
    assert reading.available[Source.NVML]
    assert reading.of(Quantity.POWER_WATTS) == {"gpu0": 121.5}
    assert reading.of(Quantity.TEMPERATURE_CELSIUS) == {"gpu0": 61.0}
    assert reading.of(Quantity.UTILIZATION_RATIO) == {"gpu0": 0.87}
    assert reading.of(Quantity.CLOCK_HERTZ) == {"gpu0": 1980e6, "gpu0_memory": 1980e6}
    assert reading.of(Quantity.MEMORY_BYTES) == {"gpu0_total": 1000.0, "gpu0_available": 400.0}
    assert [name for name, on in reading.of(Quantity.THROTTLED).items() if on] == ["gpu0_power_cap"]
    assert reading.energy_j == pytest.approx(243.0)


def test_nvml_of_a_jetson_leaves_out_what_it_refuses():
    reading = Telemetry([NvmlReader(RecordedNvml(nvmlDeviceGetTemperature=55))]).read(0.0)
    assert [(s.quantity, s.name) for s in reading.samples] == [(Quantity.TEMPERATURE_CELSIUS, "gpu0")]


def test_an_nvml_that_answers_nothing_is_unavailable():
    reading = Telemetry([NvmlReader(RecordedNvml())]).read(0.0)
    assert not reading.available[Source.NVML]
