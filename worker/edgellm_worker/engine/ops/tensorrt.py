"""`TensorRtOps`: an `Ops` that records what a model does, to be lowered to TensorRT networks and CUDA kernels.

Types. The residual stream is float32; what feeds a matrix product is float16, and so is its result. States, gates, the
delta rule and L2 norms are float32, as `Ops` demands. Norms compute in float32 and give float16.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array, DenseWeight, Weight
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending, KvCache
from edgellm_worker.engine.ops.graph import Dtype, Graph, Node, Op, Value

F32, F16, I32 = Dtype.FLOAT32, Dtype.FLOAT16, Dtype.INT32


class Reader(Protocol):
    """In which form weights run."""

    def __call__(self, weight: Weight) -> Weight:
        """The weight itself, or decoded."""

    def packs(self, weight: Weight, /) -> bool:
        """Whether a kernel of this package multiplies by it as it is, instead of a network."""


class AsStored:
    """A `Reader` that decodes and packs nothing: what a checkpoint holds."""

    def __call__(self, weight: Weight) -> Weight:
        return weight

    def packs(self, _weight: Weight) -> bool:
        return False


class TensorRtOps:
    """Implements `Ops[Value]`. Make one per graph; declare inputs with `input`, end with `graph`."""

    def __init__(self, read: Reader | None = None) -> None:
        self._read: Reader = read or AsStored()
        self._nodes: list[Node] = []
        self._inputs: dict[str, Value] = {}

    def input(self, name: str, shape: Sequence[int], dtype: Dtype) -> Value:
        if name in self._inputs:
            raise BuildError(f"graph input {name} is declared twice")
        value = Value(tuple(shape), dtype, name)
        self._inputs[name] = value
        return value

    def graph(self, outputs: dict[str, Value]) -> Graph:
        return Graph(tuple(self._nodes), dict(self._inputs), dict(outputs))

    def _node(self, op: Op, *inputs: Value, weights: Sequence[Weight] = (), attrs: tuple[Hashable, ...] = ()) -> Node:
        node = Node(op, inputs, tuple(self._read(weight) for weight in weights), attrs)
        self._nodes.append(node)
        return node

    def _one(self, node: Node, shape: Sequence[int], dtype: Dtype) -> Value:
        return node.emit((tuple(shape), dtype))[0]

    # --- tokens, projections, pointwise ---

    def embed(self, table: Weight, ids: Value) -> Value:
        return self._one(self._node(Op.EMBED, ids, weights=[table]), (*ids.shape, table.shape[1]), F32)

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        _same(weight.shape[1], x.shape[-1], "linear")
        weights = [weight] if bias is None else [weight, bias]
        op = Op.PACKED_LINEAR if self._read.packs(weight) else Op.LINEAR
        return self._one(self._node(op, x, weights=weights), (*x.shape[:-1], weight.shape[0]), F16)

    def fused_linear(self, x: Value, weights: Sequence[Weight], biases: Sequence[Weight | None]) -> tuple[Value, ...]:
        """One product of the dense weights, where either all or none of them have a bias. The others have one each:
        quantized weights have scales of their own.
        """
        pairs = list(zip(weights, biases, strict=True))
        are_dense = [isinstance(self._read(weight), DenseWeight) for weight in weights]
        dense = [pair for pair, is_dense in zip(pairs, are_dense, strict=True) if is_dense]
        given = [bias for _, bias in dense if bias is not None]
        if len(dense) < 2 or len(given) not in (0, len(dense)):
            return tuple(self.linear(x, weight, bias) for weight, bias in pairs)
        sizes = tuple(weight.shape[0] for weight, _ in dense)
        node = self._node(Op.FUSED_LINEAR, x, weights=[*(weight for weight, _ in dense), *given], attrs=(sizes,))
        joint = iter(node.emit(*(((*x.shape[:-1], size), F16) for size in sizes)))
        return tuple(
            next(joint) if is_dense else self.linear(x, *pair) for pair, is_dense in zip(pairs, are_dense, strict=True)
        )

    def rms_norm(self, x: Value, weight: Weight, eps: float, *, zero_centred: bool) -> Value:
        _same(weight.shape[0], x.shape[-1], "rms_norm")
        return self._one(self._node(Op.RMS_NORM, x, weights=[weight], attrs=(eps, zero_centred)), x.shape, F16)

    def gated_rms_norm(self, x: Value, gate: Value, weight: Weight, eps: float) -> Value:
        return self._one(self._node(Op.GATED_RMS_NORM, x, gate, weights=[weight], attrs=(eps,)), x.shape, F16)

    def l2_norm(self, x: Value, eps: float, scale: float) -> Value:
        return self._one(self._node(Op.L2_NORM, x, attrs=(eps, scale)), x.shape, F32)

    def swiglu(self, gate: Value, up: Value) -> Value:
        return self._one(self._node(Op.SWIGLU, gate, up), gate.shape, F16)

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        return self._one(self._node(Op.SIGMOID_GATE, x, gate), x.shape, F16)

    def add(self, a: Value, b: Value) -> Value:
        _same(a.shape, b.shape, "add")
        return self._one(self._node(Op.ADD, a, b), a.shape, F32)

    # --- shape ---

    def concat(self, xs: Sequence[Value]) -> Value:
        width = sum(x.shape[-1] for x in xs)
        return self._one(self._node(Op.CONCAT, *xs), (*xs[0].shape[:-1], width), _common(xs))

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        _same(sum(sizes), x.shape[-1], "split")
        node = self._node(Op.SPLIT, x, attrs=(tuple(sizes),))
        return node.emit(*(((*x.shape[:-1], size), x.dtype) for size in sizes))

    def split_heads(self, x: Value, num_heads: int) -> Value:
        shape = (*x.shape[:-1], num_heads, x.shape[-1] // num_heads)
        return self._one(self._node(Op.SPLIT_HEADS, x, attrs=(num_heads,)), shape, x.dtype)

    def merge_heads(self, x: Value) -> Value:
        return self._one(self._node(Op.MERGE_HEADS, x), (*x.shape[:-2], x.shape[-2] * x.shape[-1]), x.dtype)

    def gather_rows(self, x: Value, index: Value) -> Value:
        return self._one(self._node(Op.GATHER_ROWS, x, index), (*index.shape, *x.row_shape), x.dtype)

    # --- attention ---

    def token_positions(self, start: Value, ids: Value) -> Value:
        return self._one(self._node(Op.TOKEN_POSITIONS, start), ids.shape[:2], I32)

    def rope_angles(self, positions: Value, inv_freq: Array, magnitude: float) -> tuple[Value, Value]:
        frequencies = tuple(float(value) for value in np.asarray(inv_freq))
        node = self._node(Op.ROPE_ANGLES, positions, attrs=(frequencies, magnitude))
        shape = (*positions.shape, len(frequencies))
        cos, sin = node.emit((shape, F32), (shape, F32))
        return cos, sin

    def rotary(self, x: Value, cos: Value, sin: Value) -> Value:
        return self._one(self._node(Op.ROTARY, x, cos, sin), x.shape, F16)

    def attend(
        self, qkv: tuple[Value, Value, Value], cache: KvCache[Value], start: Value, scale: float
    ) -> tuple[Value, KvCache[Value]]:
        scales = (float(cache.scales.k_scale), float(cache.scales.v_scale))
        node = self._node(Op.ATTEND, *qkv, cache.k, cache.v, start, attrs=(scale, *scales))
        out, k, v = node.emit((qkv[0].shape, F16), (cache.k.shape, cache.k.dtype), (cache.v.shape, cache.v.dtype))
        return out, replace(cache, k=k, v=v)

    # --- Gated DeltaNet ---

    def conv_commit(self, tail: Value, pending: Value, commit: Value) -> Value:
        return self._one(self._node(Op.CONV_COMMIT, tail, pending, commit), tail.shape, tail.dtype)

    def causal_conv(self, x: Value, tail: Value, weight: Weight) -> Value:
        return self._one(self._node(Op.CAUSAL_CONV, x, tail, weights=[weight]), x.shape, F32)

    def delta_gates(self, a: Value, b: Value, a_log: Weight, dt_bias: Weight) -> tuple[Value, Value]:
        node = self._node(Op.DELTA_GATES, a, b, weights=[a_log, dt_bias])
        log_g, beta = node.emit((a.shape, F32), (b.shape, F32))
        return log_g, beta

    def gated_delta_rule(
        self, inputs: DeltaInputs[Value], state: Value, pending: DeltaPending[Value], commit: Value
    ) -> tuple[Value, Value, DeltaPending[Value]]:
        new = (inputs.q, inputs.k, inputs.v, inputs.log_g, inputs.beta)
        node = self._node(Op.GATED_DELTA_RULE, *new, state, pending.k, pending.u, pending.log_g, commit)
        out, folded, u = node.emit((inputs.v.shape, F32), (state.shape, F32), (inputs.v.shape, F32))
        return out, folded, DeltaPending(k=inputs.k, u=u, log_g=inputs.log_g)

    def delta_fold(self, state: Value, pending: DeltaPending[Value], commit: Value) -> Value:
        node = self._node(Op.DELTA_FOLD, state, pending.k, pending.u, pending.log_g, commit)
        return self._one(node, state.shape, F32)

    # --- scores ---

    def arg_max(self, x: Value) -> Value:
        return self._one(self._node(Op.ARG_MAX, x), x.shape[:-1], I32)

    def top_k(self, x: Value, k: int) -> tuple[Value, Value]:
        values, ids = self._node(Op.TOP_K, x, attrs=(k,)).emit(((*x.shape[:-1], k), F32), ((*x.shape[:-1], k), I32))
        return values, ids

    def log_sum_exp(self, x: Value) -> Value:
        return self._one(self._node(Op.LOG_SUM_EXP, x), x.shape[:-1], F32)


def _same(a: object, b: object, op: str) -> None:
    if a != b:
        raise BuildError(f"{op}: shapes do not agree ({a} and {b})")


def _common(xs: Sequence[Value]) -> Dtype:
    return F32 if any(x.dtype is F32 for x in xs) else F16
