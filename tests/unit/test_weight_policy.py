"""Which way quantized weights run, and that products with packed ones are kernel calls with the right arguments."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.plan import plan_memory
from edgellm_worker.engine.build.segments import KernelCall, Segment, WeightGroup, cut
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.weight_policy import Running, WeightPolicy
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Dtype, Lowering, Op
from edgellm_worker.engine.ops.tensorrt import TensorRtOps
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import lay_out
from edgellm_worker.engine.runtime.tensorrt_program import Bindings, Parts, Program
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from tests.support.recording_device import NoNetworks, RecordingDevice
from tests.support.tensorrt_models import qwen_27b, tiny_shapes

SPEC = EngineSpec(4, 256, 4, KvDtype.FLOAT16, prefill_chunk=16, packs=True)


def fp8(k: int = 64) -> Fp8Weight:
    return Fp8Weight(np.zeros((32, k), ml_dtypes.float8_e4m3fn), np.float32(0.5))


def nvfp4(input_scale: float | None) -> Nvfp4Weight:
    blocks = np.ones((32, 4), ml_dtypes.float8_e4m3fn)
    scale = None if input_scale is None else np.float32(input_scale)
    return Nvfp4Weight(np.zeros((32, 32), np.uint8), blocks, np.float32(2), scale)


NATIVE, PACKED, DECODED = Running.NATIVE, Running.PACKED, Running.DECODED
DENSE = DenseWeight(np.zeros((32, 64), np.float16))


@pytest.mark.parametrize(
    ("weight", "nothing", "packs_only", "native_only", "both"),
    [
        (DENSE, NATIVE, NATIVE, NATIVE, NATIVE),
        (fp8(), DECODED, PACKED, NATIVE, NATIVE),
        (fp8(k=60), DECODED, DECODED, NATIVE, NATIVE),  # no row of x would begin where the kernel can read it
        (nvfp4(input_scale=0.1), DECODED, PACKED, NATIVE, NATIVE),
        (nvfp4(input_scale=None), DECODED, PACKED, NATIVE, PACKED),  # natively it would be decoded on every call
    ],
)
def test_the_first_way_that_can_be_had(weight: Weight, nothing, packs_only, native_only, both) -> None:
    policies = [WeightPolicy(native, native, packs) for native in (False, True) for packs in (False, True)]
    assert [policy.running(weight) for policy in policies] == [nothing, packs_only, native_only, both]


def test_what_only_has_a_shape_is_counted_and_cut_as_what_is_decoded() -> None:
    """And is as many objects: equal weights one, different ones two."""
    spec = replace(SPEC, packs=False)
    model = tiny_shapes("qwen3_5_text", "fp8")
    decoding, shapes = spec.reader(), spec.reader(has_values=False)
    assert spec.segments(model, decoding).keys() == spec.segments(model, shapes).keys()
    assert decoding.num_decoded == shapes.num_decoded > 0
    one, other = shapes(fp8()), shapes(fp8())
    assert isinstance(one, DenseWeight)
    assert one.data.nbytes == other.data.nbytes == 2 * 32 * 64
    assert one.data.ctypes.data != other.data.ctypes.data
    assert max(one.data.strides) == 0


def test_decoding_the_27b_is_planned_without_decoding_it() -> None:
    """54 GB of float16, in no time."""
    plan = plan_memory(qwen_27b(), replace(SPEC, packs=False))
    assert 54e9 < plan.weights_bytes < 57e9


def test_the_log_says_once_how_each_kind_of_weight_runs(caplog: pytest.LogCaptureFixture) -> None:
    read = SPEC.reader()
    with caplog.at_level("INFO"):
        for weight in (DENSE, fp8(), fp8(), nvfp4(None), fp8(k=60), fp8(k=60)):
            read(weight)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "FP8 weights run as they are in a kernel of this package"),
        ("INFO", "NVFP4 weights run as they are in a kernel of this package"),
        ("WARNING", "FP8 weights are decoded to float16"),
    ]


@pytest.mark.parametrize("lowering", Lowering)
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4", "w4a16"])
def test_no_network_holds_a_quantized_product(scheme: str, lowering: Lowering) -> None:
    for graph in Recorder(tiny_shapes("qwen3_5_text", scheme), SPEC.layout, SPEC.reader()).all(16).values():
        steps = cut(graph, lowering)
        inside = [
            weight for step in steps if isinstance(step, Segment) for node in step.nodes for weight in node.weights
        ]
        assert all(isinstance(weight, DenseWeight) for weight in inside)
        packed = [s.node for s in steps if isinstance(s, KernelCall) and s.node.op is Op.PACKED_LINEAR]
        assert packed
        assert not any(isinstance(node.weights[0], DenseWeight) for node in packed)


def test_dense_products_beside_quantized_ones_are_still_one_product() -> None:
    """The small gates of Gated DeltaNet stay in 16 bits: one launch for both."""
    ops = TensorRtOps(SPEC.reader())
    weights = [fp8(), DENSE, nvfp4(None), DenseWeight(np.zeros((8, 64), np.float16))]
    outputs = ops.fused_linear(ops.input("x", (1, 2, 64), Dtype.FLOAT16), weights, [None] * 4)
    assert [out.shape[-1] for out in outputs] == [32, 32, 32, 8]
    nodes = ops.graph({}).nodes
    assert sorted(node.op for node in nodes) == [Op.FUSED_LINEAR, Op.PACKED_LINEAR, Op.PACKED_LINEAR]
    firsts = [out.producer.weights[0] for out in outputs if out.producer is not None]
    assert [[first is weight for weight in weights].index(True) for first in firsts] == [0, 1, 2, 1]


@pytest.mark.parametrize("is_fp4", [True, False])
def test_a_packed_product_is_launched_with_its_operands(is_fp4: bool) -> None:
    device = RecordingDevice()
    weight = nvfp4(None) if is_fp4 else fp8()
    ops = TensorRtOps(SPEC.reader())
    x = ops.input("x", (2, 3, 64), Dtype.FLOAT16)
    graph = ops.graph({"y": ops.linear(x, weight, DenseWeight(np.ones(32, np.float32)))})
    store = WeightStore(device)
    parts = Parts(device, store, Kernels(device, store), NoNetworks())
    bound = {"x": Binding(4096), "y": Binding(8192)}
    layout = lay_out(graph, frozenset(bound))
    program = Program(graph, layout, parts, Bindings(bound, 0, Control(0, 0, 2), Mode.STEP))
    assert [label for label, _ in program.launches] == ["packed_linear"]
    program.enqueue()
    ((signature, arguments),) = device.launched
    assert signature == "p" * 7 + "iiiiif"
    packed = store.packed(weight)
    bias = store.vector(WeightGroup((graph.nodes[0].weights[1],), is_matrix=False))
    assert arguments[:5] == (4096, packed.data, packed.scales, bias, 8192)
    assert arguments[7:10] == (6, 32, 64)
    assert arguments[10:12] == (1, 0)  # one unit of work, in one block
    assert arguments[12] == packed.factor == 256 * (2 if is_fp4 else 0.5)
    assert store.num_bytes == 4 * 32 + 32 * 128 * (1 if not is_fp4 else 0.5 + 1 / 16)


@pytest.mark.parametrize("lowering", Lowering)
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_every_pass_with_packed_products_can_be_prepared(scheme: str, lowering: Lowering) -> None:
    """Each finds its rows dense, whatever joint products and views lie around it."""
    for graph in Recorder(tiny_shapes("qwen3_5_text", scheme), SPEC.layout, SPEC.reader()).all(16).values():
        device = RecordingDevice()
        store = WeightStore(device)
        parts = Parts(device, store, Kernels(device, store), NoNetworks())
        bound = {name: Binding(1 << 40) for name in (*graph.inputs, *graph.outputs)}
        layout = lay_out(graph, frozenset(bound), lowering)
        program = Program(graph, layout, parts, Bindings(bound, 0, Control(0, 0, 4), Mode.STEP))
        assert "packed_linear" in [label for label, _ in program.launches]


def test_a_plan_counts_packed_weights_at_their_own_bytes() -> None:
    """The 27B: NVFP4 and FP8 in the base, 16 bits in head and draft; padding to whole tiles is under a percent."""
    large = qwen_27b()
    spec = EngineSpec(4, 4096, 4, KvDtype.FP8)
    native, packed = (
        plan_memory(large, replace(spec, **ways)).weights_bytes
        for ways in ({"runs_fp8": True, "runs_fp4": True}, {"packs": True})
    )
    assert native <= packed < 1.01 * native
