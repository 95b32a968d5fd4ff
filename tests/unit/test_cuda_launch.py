"""How a kernel is launched: what the GPU and its driver know decides whether launches overlap and blocks cluster."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm_worker.engine.runtime.cuda import Cuda, Kernel


class Attribute:
    def __init__(self) -> None:
        self.id = ""
        self.value = SimpleNamespace(clusterDim=SimpleNamespace())


class Names:
    """Any constant of the driver is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """As much of the CUDA driver as opening a device and launching takes. `launches`: (function called, config)."""

    CUdevice_attribute = CUlaunchAttributeID = Names()
    CUlaunchConfig, CUlaunchAttribute = SimpleNamespace, Attribute

    def __init__(self, version: int, capability: int) -> None:
        self._version = version
        self._capability = capability
        self.launches: list[tuple[str, Any]] = []

    def __getattr__(self, _name: str):
        return lambda *_arguments: (0, 0)

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802 - CUDA's name
        return 0, self._version

    def cuDeviceGetAttribute(self, kind: str, _device: int) -> tuple[int, int]:  # noqa: N802 - CUDA's name
        return 0, self._capability // 10 if kind.endswith("MAJOR") else self._capability % 10

    def cuLaunchKernel(self, *_arguments: object) -> tuple[int]:  # noqa: N802 - CUDA's name
        self.launches.append(("cuLaunchKernel", None))
        return (0,)

    def cuLaunchKernelEx(self, config: object, *_arguments: object) -> tuple[int]:  # noqa: N802 - CUDA's name
        self.launches.append(("cuLaunchKernelEx", config))
        return (0,)


OVERLAP, CLUSTER = (
    f"CU_LAUNCH_ATTRIBUTE_{name}" for name in ("PROGRAMMATIC_STREAM_SERIALIZATION", "CLUSTER_DIMENSION")
)


@pytest.mark.parametrize(
    ("version", "capability", "is_cluster", "wanted"),
    [
        (12_080, 89, False, None),
        (12_030, 90, False, [OVERLAP]),
        (13_000, 120, True, [OVERLAP, CLUSTER]),
        (12_020, 90, False, None),  # its graphs do not know launches that overlap
        (12_020, 90, True, [CLUSTER]),
    ],
)
def test_launches_overlap_and_blocks_cluster_where_gpu_and_driver_can(
    monkeypatch: pytest.MonkeyPatch, version: int, capability: int, is_cluster: bool, wanted: list[str] | None
) -> None:
    driver = Driver(version, capability)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace())
    with Cuda() as device:
        device.run(Kernel("function", "pi", 0), (6, 4, 1), 160, (4096, 7), is_cluster=is_cluster)
    ((called, config),) = driver.launches
    assert called == ("cuLaunchKernel" if wanted is None else "cuLaunchKernelEx")
    if wanted is not None:
        assert [attribute.id for attribute in config.attrs] == wanted
        assert config.numAttrs == len(wanted)
        assert (config.gridDimX, config.gridDimY, config.blockDimX) == (6, 4, 160)
    if is_cluster:
        shape = config.attrs[-1].value.clusterDim
        assert (shape.x, shape.y, shape.z) == (1, 4, 1)
