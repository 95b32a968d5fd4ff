"""Recording, cutting and placing: what becomes a network, what a kernel, and where values lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.profiles import row_ranges
from edgellm_worker.engine.build.segments import KernelCall, Segment, cut
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.weight_policy import WeightPolicy
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, KvScales, Nvfp4Weight
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.api import KvCache, KvDtype, Ops
from edgellm_worker.engine.ops.graph import KERNEL_OPS, Dtype, Graph, Lowering, Op, Value
from edgellm_worker.engine.ops.tensorrt import TensorRtOps
from edgellm_worker.engine.ops.tensorrt_rows import ROW_LOWERINGS
from edgellm_worker.engine.runtime import tensorrt_kernels, tensorrt_row_kernels
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import HeadChain, lay_out
from edgellm_worker.engine.runtime.tensorrt_program import Bindings, Parts, Program
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from edgellm_worker.engine.trt import Flavour, Library, Target, load_library, parse_version
from tests.support.recording_device import NoNetworks, RecordingDevice
from tests.support.shape_source import everywhere
from tests.support.tensorrt_models import shapes_model, tiny_config, tiny_shapes

SPEC = EngineSpec(4, 256, 4, KvDtype.FLOAT16, prefill_chunk=16)


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    model = tiny_shapes("qwen3_5_text")
    return Recorder(model, SPEC.layout, SPEC.reader()).all(16)


def test_every_op_is_recorded_and_has_a_lowering_of_each_kind() -> None:
    """A new op without one fails here."""
    ops = {name for name in vars(Ops) if not name.startswith("_")}
    assert ops == {op.value for op in Op} - {Op.PACKED_LINEAR}
    assert all(hasattr(TensorRtOps, op) for op in ops)
    assert set(ROW_LOWERINGS) == set(Op) - KERNEL_OPS
    assert set(tensorrt_kernels._CALLS) == KERNEL_OPS
    assert set(tensorrt_row_kernels._CALLS) == set(Op) - KERNEL_OPS - {Op.LINEAR, Op.FUSED_LINEAR}


@pytest.mark.parametrize("lowering", Lowering)
def test_steps_run_in_an_order_in_which_every_value_is_made_before_it_is_read(graphs, lowering: Lowering) -> None:
    for graph in graphs.values():
        made = set(graph.inputs.values())
        for step in cut(graph, lowering):
            inputs = step.inputs if isinstance(step, Segment) else step.node.inputs
            assert set(inputs) <= made
            made.update(step.outputs if isinstance(step, Segment) else step.node.outputs)
            if isinstance(step, Segment):  # a joint product's parts are made with its first
                made.update(value for node in step.joined for value in node.outputs)
        assert set(graph.outputs.values()) <= made


def test_layers_of_one_kind_share_their_networks(graphs) -> None:
    segments = [step for step in cut(graphs["verify"]) if isinstance(step, Segment)]
    assert len(segments) == 15
    assert len({segment.key for segment in segments}) == 6
    assert {step.key for step in cut(graphs["prefill"]) if isinstance(step, Segment)} & {s.key for s in segments}


def test_networks_of_products_hold_nothing_else(graphs) -> None:
    steps = cut(graphs["verify"], Lowering.PRODUCTS)
    inside = {node.op for step in steps if isinstance(step, Segment) for node in step.nodes}
    assert inside == {Op.LINEAR, Op.FUSED_LINEAR}
    assert not any(isinstance(step, KernelCall) and step.node.op in inside for step in steps)


def test_what_leads_nowhere_is_not_run(graphs) -> None:
    """A draft head that only keeps up writes its cache; its attention output, MLP and logits are for nobody."""
    assert [step.node.op for step in cut(graphs["draft idle"]) if isinstance(step, KernelCall)][-1] is Op.ATTEND
    assert len(cut(graphs["draft idle"])) < len(cut(graphs["draft first"]))


@pytest.mark.parametrize("lowering", Lowering)
def test_values_that_live_at_once_never_overlap(graphs, lowering: Lowering) -> None:
    """Replays each layout with a last-use table of its own, views and fused sums included."""
    for graph in graphs.values():
        layout = lay_out(graph, frozenset(), lowering)
        read_at: dict[Value, int] = {}
        stored: set[Value] = set()
        for index, step in enumerate(layout.steps):
            values = list(step.inputs if isinstance(step, Segment) else step.node.inputs)
            for value in values:  # grows: what a fused node reads is read by the one that does its work
                if value.producer in layout.fused and value not in stored:
                    values += value.producer.inputs
            if isinstance(step, KernelCall) and step.node.op is Op.RMS_NORM:
                stored.add(step.node.inputs[0])  # a sum: later readers find it there
            read_at.update((layout.roots.get(value, value), index) for value in values)
        read_at.update((layout.roots.get(value, value), len(layout.steps)) for value in graph.outputs.values())
        alive: list[tuple[int, int, int]] = []
        for index, step in enumerate(layout.steps):
            alive = [span for span in alive if span[2] >= index]
            for value in step.outputs if isinstance(step, Segment) else step.node.outputs:
                if value not in layout.offsets:
                    continue
                begin = layout.offsets[value]
                end = begin + value.num_rows * layout.view(value).pitch * value.dtype.num_bytes
                assert all(end <= other or begin >= other_end for other, other_end, _ in alive)
                assert end <= layout.num_bytes
                alive.append((begin, end, read_at.get(value, index)))


@pytest.mark.parametrize("lowering", Lowering)
def test_a_prompt_piece_needs_no_more_places_for_more_layers(lowering: Lowering) -> None:
    """What a layer leaves to be folded lives no longer than the layer; nor do the terms of the residual stream."""
    config = tiny_config("qwen3_5_text")
    sizes = []
    for repeats in (1, 4):
        model = shapes_model(replace(config, layers=config.layers * repeats), everywhere("dense"))
        graphs = Recorder(model, SPEC.layout, SPEC.reader()).all(16)
        sizes.append([lay_out(graphs[name], frozenset(), lowering).num_bytes for name in ("prefill", "verify")])
    assert sizes[0] == sizes[1]


def test_a_layer_is_folded_behind_its_convolution_and_its_delta_rule(graphs) -> None:
    seen: set[tuple[Op, Value]] = set()
    folded = 0
    for node in graphs["prefill"].nodes:
        if node.op is Op.CONV_COMMIT and node.inputs[1].producer is not None:
            assert (Op.CAUSAL_CONV, node.inputs[0]) in seen
            folded += 1
        elif node.op is Op.DELTA_FOLD:
            assert node.inputs[0].producer.op is Op.GATED_DELTA_RULE
            assert (Op.GATED_DELTA_RULE, node.inputs[1]) in seen
            folded += 1
        seen.update((node.op, value) for value in node.inputs)
    assert folded == 2 * sum(node.op is Op.GATED_DELTA_RULE for node in graphs["prefill"].nodes) > 0


def test_parts_of_a_joint_product_are_read_where_it_left_them(graphs) -> None:
    """Attention's queries, keys and values: one buffer, whose rows hold all three; gated queries skip their gates."""
    layout = lay_out(graphs["verify"], frozenset(), Lowering.PRODUCTS)
    attend = next(step.node for step in layout.steps if isinstance(step, KernelCall) and step.node.op is Op.ATTEND)
    query, key = (HeadChain.of(value, layout.fused) for value in attend.inputs[:2])
    q, k, v = (layout.view(value) for value in (query.source, key.source, attend.inputs[2]))
    heads, dim = attend.inputs[0].shape[2:]
    kv_heads = attend.inputs[1].shape[2]
    assert q.root is k.root is v.root
    assert q.pitch == k.pitch == v.pitch == (2 * heads + 2 * kv_heads) * dim
    assert (q.offset, k.offset, v.offset) == (0, 2 * heads * dim, (2 * heads + kv_heads) * dim)
    assert (q.step, k.step, v.step) == (2 * dim, dim, dim)
    assert query.norm is not None
    assert key.rotary is not None


def test_a_part_that_is_wanted_by_itself_is_not_left_in_the_joint_product() -> None:
    ops = TensorRtOps()
    weights = [DenseWeight(np.zeros((8, 4), np.float16))] * 2
    one, other = ops.fused_linear(ops.input("x", (1, 2, 4), Dtype.FLOAT16), weights, [None, None])
    graph = ops.graph({"one": one, "gated": ops.swiglu(one, other)})
    (segment,) = (step for step in cut(graph, Lowering.PRODUCTS) if isinstance(step, Segment))
    assert segment.joined == ()
    assert segment.outputs == (one, other)


def gated(rows: int, *, is_gate_wanted: bool = False) -> Graph:
    ops = TensorRtOps()
    weights = [DenseWeight(np.zeros((64, 16), np.float16))] * 2
    gate, up = ops.fused_linear(ops.input("x", (1, rows, 16), Dtype.FLOAT16), weights, [None, None])
    down = ops.linear(ops.swiglu(gate, up), DenseWeight(np.zeros((16, 64), np.float16)))
    return ops.graph({"y": down, "gate": gate} if is_gate_wanted else {"y": down})


def test_a_product_of_few_rows_does_the_activation_behind_it() -> None:
    """Its two parts are never stored; what comes of them has a place from that product on, beside the product's input."""
    layout = lay_out(gated(48), frozenset({"x", "y"}), Lowering.PRODUCTS)
    (activation,) = layout.activations.values()
    assert [type(step) for step in layout.steps] == [Segment, Segment]
    assert set(layout.offsets) == set(activation.outputs)
    assert layout.num_bytes == 2 * 48 * 64


@pytest.mark.parametrize("graph", [gated(49), gated(48, is_gate_wanted=True)], ids=["many rows", "a part is wanted"])
def test_other_activations_are_launches(graph: Graph) -> None:
    layout = lay_out(graph, frozenset(graph.outputs), Lowering.PRODUCTS)
    assert not layout.activations
    assert len(layout.steps) == 3


@pytest.mark.parametrize("lowering", Lowering)
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3", "llama"])
def test_every_pass_can_be_prepared(family: str, lowering: Lowering) -> None:
    """Every kernel finds its values as it wants them, and gets as many arguments, of the kinds, as it takes."""
    spec = replace(SPEC, prefill_chunk=32, lowering=lowering)
    for graph in Recorder(tiny_shapes(family), spec.layout, spec.reader()).all(32).values():
        device = RecordingDevice()
        weights = WeightStore(device)
        parts = Parts(device, weights, Kernels(device, weights), NoNetworks())
        bound = {name: Binding(1 << 40) for name in (*graph.inputs, *graph.outputs)}
        layout = lay_out(graph, frozenset(bound), lowering)
        Program(graph, layout, parts, Bindings(bound, 0, Control(0, 0, 4), Mode.STEP)).enqueue()
        assert device.launched
        for signature, arguments in device.launched:
            assert len(signature) == len(arguments)
            assert all(
                isinstance(given, float) == (kind == "f") for kind, given in zip(signature, arguments, strict=True)
            )


@pytest.mark.parametrize(("block_kib", "warps"), [(99, 4), (227, 8)], ids=["SM120", "SM90"])
def test_a_block_of_a_steps_attention_fits_the_gpu(block_kib: int, warps: int) -> None:
    """Heads of 256, as the 27B has them: eight warps leave more to be merged than most GPUs give a block."""
    ops = TensorRtOps()
    q, k, v = (ops.input(name, (1, 4, heads, 256), Dtype.FLOAT16) for name, heads in (("q", 24), ("k", 4), ("v", 4)))
    caches = [ops.input(name, (1, 4, 4096, 256), Dtype.FLOAT16) for name in ("ck", "cv")]
    one = KvScales(np.float32(1), np.float32(1))
    start = ops.input("start", (1,), Dtype.INT32)
    out, _ = ops.attend((q, k, v), KvCache(*caches, KvDtype.FLOAT16, one), start, 0.0625)
    graph = ops.graph({"out": out})
    device = RecordingDevice(block_kib << 10)
    weights = WeightStore(device)
    bound = {name: Binding(1 << 40) for name in (*graph.inputs, *graph.outputs)}
    layout = lay_out(graph, frozenset(bound), Lowering.ROWS)
    parts = Parts(device, weights, Kernels(device, weights), NoNetworks())
    Program(graph, layout, parts, Bindings(bound, 0, Control(0, 0, 1), Mode.STEP))
    kernel = device.kernels["attend_step"]
    assert kernel.macros["WARPS"] == warps
    assert kernel.shared_bytes <= block_kib << 10


@pytest.mark.parametrize(
    ("rows", "weight", "bias", "is_kernel"),
    [
        (48, DenseWeight(np.zeros((48, 64), np.float16)), None, True),
        (49, DenseWeight(np.zeros((48, 64), np.float16)), None, False),
        (4, DenseWeight(np.zeros((48, 84), np.float16)), None, False),
        (4, DenseWeight(np.zeros((48, 64), np.float16)), DenseWeight(np.zeros(48, np.float32)), False),
        (4, Fp8Weight(np.zeros((48, 64), np.uint8), np.float32(1)), None, False),
    ],
    ids=["few rows", "many rows", "odd depth", "bias", "quantized"],
)
def test_which_products_are_a_kernel_call(
    rows: int, weight: DenseWeight | Fp8Weight, bias: DenseWeight | None, is_kernel: bool
) -> None:
    ops = TensorRtOps()
    y = ops.linear(ops.input("x", (1, rows, weight.shape[1]), Dtype.FLOAT16), weight, bias)
    graph = ops.graph({"y": y})
    device = RecordingDevice()
    weights = WeightStore(device)
    parts = Parts(device, weights, Kernels(device, weights), NoNetworks())
    layout = lay_out(graph, frozenset({"x", "y"}), Lowering.PRODUCTS)
    bound = {"x": Binding(1 << 40), "y": Binding(1 << 41)}
    program = Program(graph, layout, parts, Bindings(bound, 0, Control(0, 0, 1), Mode.STEP))
    ((label, _),) = program.launches
    assert label.startswith("product" if is_kernel else "network")


def test_shapes_that_do_not_agree_are_refused_by_the_op() -> None:
    ops = TensorRtOps()
    x = ops.input("x", (1, 2, 8), Dtype.FLOAT16)
    with pytest.raises(BuildError, match="linear: shapes do not agree"):
        ops.linear(x, DenseWeight(np.zeros((4, 9), np.float16)))
    with pytest.raises(BuildError, match="declared twice"):
        ops.input("x", (1,), Dtype.INT32)


@pytest.mark.parametrize(("slots", "verify", "chunk"), [(1, 1, 16), (4, 6, 128), (8, 6, 128), (64, 4, 128), (2, 4, 8)])
def test_row_ranges_cover_every_pass_without_gaps(slots: int, verify: int, chunk: int) -> None:
    ranges = row_ranges(slots, verify, chunk)
    covered = [rows for one in ranges for rows in range(one.least, one.most + 1)]
    assert covered == list(range(1, max(slots * verify, chunk) + 1))
    assert all(one.least <= one.typical <= one.most for one in ranges)


@pytest.mark.parametrize(
    ("flavour", "version", "fp8", "fp4", "lowering"),
    [
        (Flavour.TENSORRT, "8.6.1", False, False, Lowering.PRODUCTS),
        (Flavour.TENSORRT, "10.3.0", True, False, Lowering.ROWS),
        (Flavour.TENSORRT, "10.15.1.29", True, True, Lowering.ROWS),
        (Flavour.TENSORRT_RTX, "1.7.1.116", True, True, Lowering.ROWS),
    ],
)
def test_what_a_release_can_do(flavour: Flavour, version: str, fp8: bool, fp4: bool, lowering: Lowering) -> None:
    library = Library(None, flavour, parse_version(version))
    assert (library.has_fp8, library.has_fp4) == (fp8, fp4)
    assert library.lowering is lowering


def test_a_missing_library_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(BuildError, match=r"edgellm-worker\[tensorrt\].*edgellm-worker\[rtx\]"):
        load_library(Flavour.TENSORRT)


def test_weights_that_the_target_cannot_run_are_decoded_once_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rtx = Library(None, Flavour.TENSORRT_RTX, (1, 7, 1))
    on_ada, on_blackwell = (WeightPolicy.of(rtx, target) for target in (Target.SM89, Target.SM120))
    spec = EngineSpec(1, 64, 1, KvDtype.FLOAT16, runs_fp8=on_ada.runs_fp8, runs_fp4=on_ada.runs_fp4)
    fp4 = Nvfp4Weight(np.full((2, 16), 0x22, np.uint8), np.ones((2, 2), np.float32), np.float32(2))
    fp8 = Fp8Weight(np.ones((2, 2), np.float32), np.float32(0.5))
    read = spec.reader()
    assert on_blackwell.runs(fp4)
    assert not on_ada.runs(fp4)
    assert read(fp8) is fp8
    assert "decoded to float16" not in caplog.text
    decoded = read(_e4m3(fp4))
    assert isinstance(decoded, DenseWeight)
    assert np.all(decoded.data == np.float16(2))
    assert "decoded to float16" in caplog.text


def _e4m3(weight: Nvfp4Weight) -> Nvfp4Weight:
    import ml_dtypes

    return Nvfp4Weight(weight.data, weight.block_scale.astype(ml_dtypes.float8_e4m3fn), weight.global_scale)
