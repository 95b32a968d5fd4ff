"""Free memory of a GPU that shares the host's: file pages are free, whatever the driver says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgellm_worker.engine.runtime import cuda
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.host_memory import available_bytes

GIB = 1 << 30


class Driver:
    """As much of the CUDA driver as opening a device and asking for its memory takes."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_INTEGRATED="integrated")

    def __init__(self, *, is_integrated: bool) -> None:
        self._is_integrated = is_integrated

    def __getattr__(self, name: str):
        return lambda *_arguments: (0, 0)

    def cuDeviceGetAttribute(self, kind: str, _device: int) -> tuple[int, int]:  # noqa: N802 - CUDA's name
        return 0, int(kind == "integrated" and self._is_integrated)

    def cuMemGetInfo(self) -> tuple[int, int, int]:  # noqa: N802 - CUDA's name
        return 0, 3 * GIB, 128 * GIB


@pytest.mark.parametrize(
    ("is_integrated", "available", "free"), [(False, 90, 3), (True, 90, 90), (True, 1, 3), (True, 500, 128)]
)
def test_what_the_kernel_would_give_up_is_free_where_the_gpu_has_no_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, is_integrated: bool, available: int, free: int
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Driver(is_integrated=is_integrated))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace())
    monkeypatch.setattr(cuda, "available_bytes", lambda: available * GIB)
    with Cuda() as device:
        assert device.memory() == (free * GIB, 128 * GIB)


def test_the_kernels_estimate_is_read_in_bytes(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  131000 kB\nMemFree:  1000 kB\nMemAvailable:   90000 kB\n")
    assert available_bytes(meminfo) == 90000 * 1024
    meminfo.write_text("MemTotal:  131000 kB\n")
    assert available_bytes(meminfo) == 0
    assert available_bytes(tmp_path / "nowhere") == 0
