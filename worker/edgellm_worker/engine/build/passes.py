"""The passes a TensorRT engine runs, recorded from the models: what is built, and what the executor replays.

    prefill      one row, N prompt tokens, folded at the end; hidden of all, the best candidates behind the last
    draft fill   the draft head over a prefill chunk's pairs: its cache only
    draft first  the draft head over a round's newly committed pairs, then the first draft
    draft next   one more draft from the one before
    verify       the base over [last token, drafts]: hidden, and the best candidates of each position

Rows of every pass find their state by slot on the device, so a recorded pass knows shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgellm_worker.engine.checkpoint.weights import KvScales
from edgellm_worker.engine.models.decoder import AttentionLayer
from edgellm_worker.engine.models.layers import DeltaNetState, fold
from edgellm_worker.engine.models.mtp import Mtp
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import DeltaPending, KvCache, KvDtype
from edgellm_worker.engine.ops.graph import Dtype, Graph, Node, Op, Value
from edgellm_worker.engine.ops.tensorrt import Reader, TensorRtOps
from edgellm_worker.engine.runtime.scores import NUM_CANDIDATES

PENDING_HALVES: Final = 2  # k and log g are kept twice: one half is read while the other is written


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All slots' state, by name: shape and type. One recurrent state per slot, never one per verify position."""

    num_slots: int
    capacity: int
    max_verify: int
    kv_dtype: KvDtype

    def __post_init__(self) -> None:
        if self.kv_dtype not in (KvDtype.FLOAT16, KvDtype.FP8):
            raise ValueError(f"the TensorRT engine keeps keys and values in float16 or fp8, not {self.kv_dtype}")

    def tensors(self, model: Model) -> dict[str, tuple[tuple[int, ...], Dtype]]:
        found: dict[str, tuple[tuple[int, ...], Dtype]] = {}
        for index, layer in enumerate(model.base.layers):
            if isinstance(layer, AttentionLayer):
                found.update(self._cache(model, f"base.{index}"))
            else:
                found.update(self._delta(model, f"base.{index}"))
        if model.mtp is not None:
            found.update(self._cache(model, "draft"))
            carried = (self.num_slots, self.max_verify, model.config.hidden_size)
            found["carried"] = (carried, Dtype.FLOAT16)
        return found

    def _cache(self, model: Model, name: str) -> dict[str, tuple[tuple[int, ...], Dtype]]:
        attention = model.config.attention
        shape = (self.num_slots, attention.num_kv_heads, self.capacity, attention.head_dim)
        dtype = Dtype.FP8 if self.kv_dtype is KvDtype.FP8 else Dtype.FLOAT16
        return {f"{name}.k": (shape, dtype), f"{name}.v": (shape, dtype)}

    def _delta(self, model: Model, name: str) -> dict[str, tuple[tuple[int, ...], Dtype]]:
        delta = model.config.delta_net
        if delta is None:
            raise ValueError("a Gated DeltaNet layer without its sizes")
        slots, rows, heads = self.num_slots, self.max_verify, delta.num_value_heads
        return {
            f"{name}.state": ((slots, heads, delta.key_dim, delta.value_dim), Dtype.FLOAT32),
            f"{name}.tail": ((slots, delta.conv_kernel - 1, delta.num_channels), Dtype.FLOAT16),
            f"{name}.conv_pending": ((slots, rows, delta.num_channels), Dtype.FLOAT16),
            f"{name}.pending_k": ((slots * PENDING_HALVES, rows, delta.num_key_heads, delta.key_dim), Dtype.FLOAT32),
            f"{name}.pending_u": ((slots, rows, heads, delta.value_dim), Dtype.FLOAT32),
            f"{name}.pending_log_g": ((slots * PENDING_HALVES, rows, heads), Dtype.FLOAT32),
        }


class Recorder:
    """Records passes of one model over one state layout. `read` gives the form in which each weight runs."""

    def __init__(self, model: Model, layout: StateLayout, read: Reader) -> None:
        self._model = model
        self._layout = layout
        self._tensors = layout.tensors(model)
        self._read = read

    def prefill(self, num_tokens: int) -> Graph:
        ops, base = TensorRtOps(self._read), self._model.base
        ids = ops.input("ids", (1, num_tokens), Dtype.INT32)
        start, commit, last = (ops.input(name, (1,), Dtype.INT32) for name in ("start", "nothing", "count"))
        hidden, memory = base.run(ops, ids, self._memory(ops), start, commit)
        for state in memory:
            if isinstance(state, DeltaNetState):
                fold(ops, state, last)
        row = ops.gather_rows(hidden, ops.input("last_row", (1, 1), Dtype.INT32))
        scores = self._scores(ops, base.logits(ops, row))
        return _folds_early(ops.graph({"hidden": hidden, "last_hidden": row, **scores}))

    def draft_fill(self, num_tokens: int) -> Graph:
        ops, mtp = TensorRtOps(self._read), self._draft_head()
        ids = ops.input("next_ids", (1, num_tokens), Dtype.INT32)
        hidden = ops.input("hidden", (1, num_tokens, self._model.config.hidden_size), Dtype.FLOAT16)
        mtp.run(ops, ids, hidden, self._cache(ops, "draft", mtp.layer.kv_scales), ops.input("start", (1,), Dtype.INT32))
        return ops.graph({})

    def draft_first(self, batch: int, *, is_chosen: bool) -> Graph:
        """`is_chosen` False: the head only keeps up, nothing is drafted."""
        ops, mtp = TensorRtOps(self._read), self._draft_head()
        width = self._layout.max_verify
        ids = ops.input("pairs", (batch, width), Dtype.INT32)
        hidden = ops.input("hidden", (batch, width, self._model.config.hidden_size), Dtype.FLOAT16)
        start = ops.input("draft_start", (batch,), Dtype.INT32)
        y, _ = mtp.run(ops, ids, hidden, self._cache(ops, "draft", mtp.layer.kv_scales), start)
        if not is_chosen:
            return ops.graph({})
        last = ops.gather_rows(y, ops.input("last_row", (batch, 1), Dtype.INT32))
        return ops.graph({"draft": ops.arg_max(self._model.base.logits(ops, last)), "y": last})

    def draft_next(self, batch: int) -> Graph:
        ops, mtp = TensorRtOps(self._read), self._draft_head()
        ids = ops.input("before", (batch, 1), Dtype.INT32)
        hidden = ops.input("y", (batch, 1, self._model.config.hidden_size), Dtype.FLOAT16)
        start = ops.input("next_start", (batch,), Dtype.INT32)
        y, _ = mtp.run(ops, ids, hidden, self._cache(ops, "draft", mtp.layer.kv_scales), start)
        return ops.graph({"draft": ops.arg_max(self._model.base.logits(ops, y)), "y_next": y})

    def verify(self, batch: int, num_tokens: int) -> Graph:
        ops, base = TensorRtOps(self._read), self._model.base
        ids = ops.input("ids", (batch, num_tokens), Dtype.INT32)
        start, commit = (ops.input(name, (batch,), Dtype.INT32) for name in ("start", "commit"))
        hidden, _ = base.run(ops, ids, self._memory(ops), start, commit)
        outputs = self._scores(ops, base.logits(ops, hidden))
        return ops.graph({"verified": hidden, **outputs} if self._model.mtp is not None else outputs)

    def all(self, chunk: int) -> dict[str, Graph]:
        """One recording of each pass this engine runs; their segments are those of every batch size."""
        rows, width = self._layout.num_slots, self._layout.max_verify
        graphs = {"prefill": self.prefill(chunk), "verify": self.verify(rows, width)}
        if self._model.mtp is not None:
            graphs["draft fill"] = self.draft_fill(chunk)
            graphs["draft first"] = self.draft_first(rows, is_chosen=True)
            graphs["draft idle"] = self.draft_first(rows, is_chosen=False)
            graphs["draft next"] = self.draft_next(rows)
        return graphs

    def _scores(self, ops: TensorRtOps, logits: Value) -> dict[str, Value]:
        values, best = ops.top_k(logits, min(NUM_CANDIDATES, self._model.config.vocab_size))
        return {"logits": logits, "values": values, "best": best, "log_sum_exp": ops.log_sum_exp(logits)}

    def _draft_head(self) -> Mtp:
        if self._model.mtp is None:
            raise ValueError("this model has no draft head")
        return self._model.mtp

    def _input(self, ops: TensorRtOps, name: str) -> Value:
        return ops.input(name, *self._tensors[name])

    def _memory(self, ops: TensorRtOps) -> list[KvCache[Value] | DeltaNetState[Value]]:
        found: list[KvCache[Value] | DeltaNetState[Value]] = []
        for index, layer in enumerate(self._model.base.layers):
            name = f"base.{index}"
            if isinstance(layer, AttentionLayer):
                found.append(self._cache(ops, name, layer.kv_scales))
                continue
            pending = DeltaPending(*(self._input(ops, f"{name}.pending_{part}") for part in ("k", "u", "log_g")))
            state, tail, conv = (self._input(ops, f"{name}.{part}") for part in ("state", "tail", "conv_pending"))
            found.append(DeltaNetState(state, tail, conv, pending))
        return found

    def _cache(self, ops: TensorRtOps, name: str, scales: KvScales) -> KvCache[Value]:
        k, v = self._input(ops, f"{name}.k"), self._input(ops, f"{name}.v")
        return KvCache(k, v, self._layout.kv_dtype, scales)


def _folds_early(graph: Graph) -> Graph:
    """Each closing fold moved up to right behind the last node that touches what it reads: a layer's deltas live as
    long as the layer, not until the end of the pass (48 layers of the 27B keep 330 MB for 128 tokens otherwise).
    """
    closing = {node for node in graph.nodes if _closes(node)}
    touched: dict[Value, Node] = {}
    for node in graph.nodes:
        if node not in closing:
            touched.update(dict.fromkeys((*node.inputs, *node.outputs), node))
    order = {node: index for index, node in enumerate(graph.nodes)}
    behind: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node in closing:
            own = (value for value in node.inputs if value.producer is not None)
            behind.setdefault(max((touched[value] for value in own), key=order.__getitem__), []).append(node)
    nodes = [each for node in graph.nodes if node not in closing for each in (node, *behind.get(node, ()))]
    return Graph(tuple(nodes), graph.inputs, graph.outputs)


def _closes(node: Node) -> bool:
    """Whether it folds what this same pass made."""
    return node.op is Op.DELTA_FOLD or (node.op is Op.CONV_COMMIT and node.inputs[1].producer is not None)
