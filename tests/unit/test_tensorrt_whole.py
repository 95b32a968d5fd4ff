"""A whole pass as one network: its lowerings, run on numpy, against the reference ops, on the packaged checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.build.passes import PENDING_HALVES, Recorder, StateLayout
from edgellm_worker.engine.build.segments import live_nodes, node_weight_groups
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.models.layers import DeltaNetState
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import DeltaPending, KvCache, KvDtype
from edgellm_worker.engine.ops.graph import KERNEL_OPS, Dtype, Graph, Op
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.ops.tensorrt import AsStored
from edgellm_worker.engine.ops.tensorrt_whole import WHOLE_LOWERINGS, emit_whole
from tests.support.numpy_layers import KEPT_AS, NumpyLayers
from tests.support.tensorrt_models import TINY

ROWS, CAPACITY = 3, 48
START, COMMIT = np.array([9, 0, 30], np.int32), np.array([2, 0, 1], np.int32)


@pytest.fixture(scope="module")
def model() -> Model:
    checkpoint = open_checkpoint(TINY)
    return read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)


def test_every_op_that_looks_across_tokens_has_a_lowering() -> None:
    assert set(WHOLE_LOWERINGS) == KERNEL_OPS - {Op.PACKED_LINEAR}  # a whole network's weights run natively


@dataclass(frozen=True)
class Case:
    """One pass's inputs: `state` as the network takes it."""

    graph: Graph
    feeds: dict[str, np.ndarray]

    def run(self) -> dict[str, np.ndarray]:
        layers = NumpyLayers({**self.feeds, **weight_feeds(self.graph)})
        emit_whole(layers, self.graph)
        return layers.outputs


def weight_feeds(graph: Graph) -> dict[str, np.ndarray]:
    """`w{i}` as the lowerings expect them: stacked matrices and tables, vectors."""
    feeds = {}
    for node in live_nodes(graph):
        for group in node_weight_groups(node):
            value = np.concatenate([decode(weight).astype(np.float32) for weight in group.weights])
            if node.op is Op.CAUSAL_CONV:
                value = value.reshape(value.shape[0], -1)
            feeds[f"w{len(feeds)}"] = value
    return feeds


def random_state(graph: Graph, kv_dtype: KvDtype, seed: int = 5) -> dict[str, np.ndarray]:
    """Plausible numbers everywhere: log g below zero, one with a gate that closes."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for name, value in graph.inputs.items():
        if "." not in name:
            continue
        is_twice = name.endswith((".pending_k", ".pending_log_g"))
        shape = (value.shape[0] // PENDING_HALVES, *value.shape[1:]) if is_twice else value.shape
        numbers = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        if name.endswith(".pending_log_g"):
            numbers = -np.abs(numbers) * 3
            numbers[0, -1] = -55.0
        if kv_dtype is KvDtype.FP8 and name.endswith((".k", ".v")):
            numbers = numbers.astype(ml_dtypes.float8_e4m3fn)
        feeds[name] = numbers.astype(KEPT_AS[value.dtype])
    return feeds


@pytest.mark.parametrize("kv_dtype", [KvDtype.FLOAT16, KvDtype.FP8])
@pytest.mark.parametrize("width", [1, 4, 11])
def test_a_verify_pass_is_what_the_reference_computes(model: Model, kv_dtype: KvDtype, width: int) -> None:
    """Eight layers of both kinds; 11 tokens need two blocks of the delta rule."""
    layout = StateLayout(ROWS, CAPACITY, width, kv_dtype)
    graph = Recorder(model, layout, AsStored()).verify(ROWS, width)
    state = random_state(graph, kv_dtype)
    ids = np.random.default_rng(2).integers(0, 8000, (ROWS, width)).astype(np.int32)
    commit = np.minimum(COMMIT, width)
    found = Case(graph, {**state, "ids": ids.reshape(-1), "start": START, "commit": commit}).run()

    ops = NumpyOps()
    memory = reference_memory(model, state, kv_dtype)
    hidden, after = model.base.run(ops, ids, memory, START, commit)
    logits = model.base.logits(ops, hidden)
    tolerance = 2e-4 if kv_dtype is KvDtype.FLOAT16 else 3e-3  # a rounding may fall on the other code
    assert relative(found["verified"], hidden) < tolerance
    assert relative(found["logits"], logits) < tolerance
    assert relative(found["log_sum_exp"], ops.log_sum_exp(logits)) < tolerance
    values, _ = ops.top_k(logits, found["values"].shape[-1])
    assert relative(found["values"], values) < tolerance
    compare_state(found, after, kv_dtype, tolerance, width)


def reference_memory(model: Model, state: dict[str, np.ndarray], kv_dtype: KvDtype) -> list:
    memory = []
    stored = KvDtype.FP8 if kv_dtype is KvDtype.FP8 else KvDtype.FLOAT32
    for index, layer in enumerate(model.base.layers):
        part = {
            name.partition(f"base.{index}.")[2]: value.copy()
            for name, value in state.items()
            if name.startswith(f"base.{index}.")
        }
        if "k" in part:
            memory.append(KvCache(part["k"], part["v"], stored, layer.kv_scales))
        else:
            pending = DeltaPending(part["pending_k"], part["pending_u"], part["pending_log_g"])
            memory.append(DeltaNetState(part["state"], part["tail"], part["conv_pending"], pending))
    return memory


def compare_state(found: dict[str, np.ndarray], after: list, kv_dtype: KvDtype, tolerance: float, width: int) -> None:
    for index, memory in enumerate(after):
        name = f"base.{index}"
        if isinstance(memory, KvCache):
            for part in ("k", "v"):
                new = found[f"{name}.{part}'"].astype(np.float32)
                whole = np.asarray(getattr(memory, part)).astype(np.float32)
                if kv_dtype is KvDtype.FP8:
                    assert new.shape[2] == width
                    whole = np.stack([row[:, first : first + width] for row, first in zip(whole, START, strict=True)])
                assert relative(new, whole) < 10 * tolerance, name
            continue
        expected = {"state": memory.state, "tail": memory.tail, "conv_pending": memory.conv_pending}
        expected |= {f"pending_{part}": getattr(memory.pending, part) for part in ("k", "u", "log_g")}
        for part, value in expected.items():
            assert relative(found[f"{name}.{part}'"], value) < tolerance, (name, part)


def test_a_draft_pass_is_what_the_reference_computes(model: Model) -> None:
    layout = StateLayout(ROWS, CAPACITY, 4, KvDtype.FLOAT16)
    graph = Recorder(model, layout, AsStored()).draft_first(ROWS, is_chosen=True)
    state = random_state(graph, KvDtype.FLOAT16)
    rng = np.random.default_rng(8)
    pairs = rng.integers(0, 8000, (ROWS, 4)).astype(np.int32)
    hidden = rng.standard_normal((ROWS, 4, model.config.hidden_size)).astype(np.float32)
    last = np.array([[1], [0], [3]], np.int32)
    feeds = {"pairs": pairs.reshape(-1), "hidden": hidden.reshape(ROWS * 4, -1), "draft_start": START}
    found = Case(graph, {**state, **feeds, "last_row": last.reshape(-1)}).run()

    ops, mtp = NumpyOps(), model.mtp
    assert mtp is not None
    cache = KvCache(state["draft.k"].copy(), state["draft.v"].copy(), KvDtype.FLOAT32, mtp.layer.kv_scales)
    y, _ = mtp.run(ops, pairs, hidden, cache, START)
    y = ops.gather_rows(y, last)
    assert relative(found["y"], y) < 2e-4
    assert found["draft"].tolist() == ops.arg_max(model.base.logits(ops, y)).reshape(-1).tolist()


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    expected = np.asarray(expected, np.float64).reshape(found.shape)
    assert np.isfinite(found.astype(np.float64)).all()
    return float(np.linalg.norm(found.astype(np.float64) - expected) / (np.linalg.norm(expected) or 1.0))


def test_inputs_of_values_that_nobody_reads_are_not_declared(model: Model) -> None:
    """A head that only keeps up needs no logits, and so no table of them."""
    layout = StateLayout(ROWS, CAPACITY, 4, KvDtype.FLOAT16)
    graph = Recorder(model, layout, AsStored()).draft_first(ROWS, is_chosen=False)
    assert {value.dtype for value in graph.inputs.values()} == {Dtype.INT32, Dtype.FLOAT16}
    assert len(weight_feeds(graph)) < len([node for node in graph.nodes if node.weights]) + 1
