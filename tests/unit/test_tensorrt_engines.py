"""Plans made runnable, against what the releases of the library have and lack."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.runtime.tensorrt_program import Engines
from edgellm_worker.engine.trt import Flavour, Library

SHAPES = {"x0": (3, 8)}
ADDRESSES = {"x0": 10, "y0": 20, "w0": 30}
RANGES = ((1, 6, 8), (1, 12, 16), (9, 12, 128))


class Context:
    """`calls` in order."""

    def __init__(self, *, runs: bool = True) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._runs = runs

    def set_optimization_profile_async(self, profile: int, _stream: int) -> bool:
        self.calls.append(("profile", profile))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.calls.append((name, shape))
        return shape[0] <= 128

    def set_tensor_address(self, name: str, address: int) -> None:
        self.calls.append((name, address))

    def execute_async_v3(self, _stream: int) -> bool:
        self.calls.append(("execute",))
        return self._runs


class SizedContext(Context):
    """Since 10.1."""

    def set_device_memory(self, memory: int, size: int) -> None:
        self.calls.append(("memory", memory, size))


class Old:
    """An engine of 8.6."""

    num_optimization_profiles = len(RANGES)
    device_memory_size = 1000

    def __init__(self, context: Context | None) -> None:
        self.context = context

    def get_tensor_profile_shape(self, _name: str, profile: int) -> list[tuple[int, int]]:
        return [(rows, 8) for rows in RANGES[profile]]

    def create_execution_context_without_device_memory(self) -> Context | None:
        return self.context


class New:
    """Of 10, 11 and TensorRT for RTX."""

    num_optimization_profiles = len(RANGES)
    device_memory_size_v2 = 2000
    get_tensor_profile_shape = Old.get_tensor_profile_shape

    def __init__(self, context: Context | None) -> None:
        self.context = context

    def create_execution_context(self, strategy: str) -> Context | None:
        assert strategy == "user"
        return self.context


class Device:
    stream = 7

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def allocate(self, num_bytes: int) -> int:
        self.allocated.append(num_bytes)
        return 4096 * len(self.allocated)

    def synchronize(self) -> None:
        pass


def engines(device: Device, *loaded: Old | New) -> Engines:
    by_plan = dict(zip((b"0", b"1"), loaded, strict=False))
    module = SimpleNamespace(
        Runtime=lambda _logger: SimpleNamespace(deserialize_cuda_engine=by_plan.get),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
    )
    found = Engines(Library(module, Flavour.TENSORRT, (10, 13, 0)), device, None)
    found.load({plan.decode(): plan for plan in by_plan})
    return found


def test_the_setter_without_a_size_is_only_for_releases_that_have_no_other() -> None:
    old, device = Context(), Device()
    engines(device, Old(old)).prepare("0", 3, SHAPES, ADDRESSES)
    assert old.device_memory == 4096
    new = SizedContext()
    engines(Device(), New(new)).prepare("0", 3, SHAPES, ADDRESSES)
    assert new.calls == [("memory", 4096, 2000), ("profile", 0), ("x0", (3, 8))]
    assert device.allocated == [1000]


def test_contexts_of_a_stream_share_the_largest_scratch_and_those_of_another_have_their_own() -> None:
    one, other, device = SizedContext(), SizedContext(), Device()
    larger = New(other)
    larger.device_memory_size_v2 = 5000
    found = engines(device, New(one), larger)
    found.prepare("0", 3, SHAPES, ADDRESSES)
    found.prepare("1", 3, SHAPES, ADDRESSES)
    found.prepare("0", 3, SHAPES, ADDRESSES)
    assert one.calls.count(("memory", 4096, 5000)) == other.calls.count(("memory", 4096, 5000)) == 1
    device.stream = 8
    found.prepare("0", 3, SHAPES, ADDRESSES)
    assert device.allocated == [5000, 5000]
    assert ("memory", 8192, 5000) in one.calls


@pytest.mark.parametrize(("rows", "profile"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (128, 2)])
def test_the_narrowest_profile_runs_a_number_of_rows(rows: int, profile: int) -> None:
    context = SizedContext()
    engines(Device(), New(context)).prepare("0", rows, {"x0": (rows, 8)}, ADDRESSES)
    assert ("profile", profile) in context.calls


def test_a_launch_sets_every_address_and_runs() -> None:
    context = SizedContext()
    engines(Device(), New(context)).prepare("0", 3, SHAPES, ADDRESSES)()
    assert context.calls[-4:] == [("x0", 10), ("y0", 20), ("w0", 30), ("execute",)]


def test_what_the_library_refuses_is_an_error_that_names_the_network() -> None:
    with pytest.raises(EngineError, match="no optimization profile takes 129 rows"):
        engines(Device(), New(SizedContext())).prepare("0", 129, SHAPES, ADDRESSES)
    with pytest.raises(EngineError, match="network 0 was not built for 3 rows"):
        engines(Device(), New(SizedContext())).prepare("0", 3, {"x0": (200, 8)}, ADDRESSES)
    with pytest.raises(EngineError, match="no execution context can be made: the GPU may be out of memory"):
        engines(Device(), New(None)).prepare("0", 3, SHAPES, ADDRESSES)
    launch = engines(Device(), New(SizedContext(runs=False))).prepare("0", 3, SHAPES, ADDRESSES)
    with pytest.raises(EngineError, match="network 0 failed to run"):
        launch()


def test_tensorrt_for_rtx_has_all_that_is_called() -> None:
    """Never run here, so at least by name."""
    trt = pytest.importorskip("tensorrt_rtx")
    for name in ("set_device_memory", *(name for name in vars(Context) if not name.startswith("_"))):
        assert hasattr(trt.IExecutionContext, name), name
    for name in vars(New):
        assert name.startswith("_") or hasattr(trt.ICudaEngine, name), name
    assert not hasattr(trt.ICudaEngine, "create_execution_context_without_device_memory")
    assert hasattr(trt.ExecutionContextAllocationStrategy, "USER_MANAGED")
    assert hasattr(trt.Runtime, "deserialize_cuda_engine")
