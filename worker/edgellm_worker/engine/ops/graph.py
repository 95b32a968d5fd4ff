"""A model, recorded: the graph that `TensorRtOps` writes and the lowerings read.

A graph is a list of nodes in execution order. Two kinds of values:

    rows    [B, N, ...]: per token. Operations on them that look at one token at a time are *row operations*; a TensorRT
            network sees them as [M, ...] with M = B * N, so one network serves every batch size and draft length
    others  caches, states, per-row counts: only *kernel operations* touch them, those that look across tokens
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from edgellm_worker.engine.checkpoint.weights import Weight


class Dtype(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT32 = "int32"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        return {"float32": 4, "float16": 2, "int32": 4, "fp8": 1}[self.value]


class Op(StrEnum):
    """One per method of `Ops`; and a `linear` whose quantized weight stays packed, as our kernel reads it."""

    EMBED = "embed"
    LINEAR = "linear"
    PACKED_LINEAR = "packed_linear"
    FUSED_LINEAR = "fused_linear"
    RMS_NORM = "rms_norm"
    GATED_RMS_NORM = "gated_rms_norm"
    L2_NORM = "l2_norm"
    SWIGLU = "swiglu"
    SIGMOID_GATE = "sigmoid_gate"
    ADD = "add"
    CONCAT = "concat"
    SPLIT = "split"
    SPLIT_HEADS = "split_heads"
    MERGE_HEADS = "merge_heads"
    GATHER_ROWS = "gather_rows"
    TOKEN_POSITIONS = "token_positions"  # noqa: S105 - an op, not a secret
    ROPE_ANGLES = "rope_angles"
    ROTARY = "rotary"
    ATTEND = "attend"
    CONV_COMMIT = "conv_commit"
    CAUSAL_CONV = "causal_conv"
    DELTA_GATES = "delta_gates"
    GATED_DELTA_RULE = "gated_delta_rule"
    DELTA_FOLD = "delta_fold"
    ARG_MAX = "arg_max"
    TOP_K = "top_k"
    LOG_SUM_EXP = "log_sum_exp"


# What looks across tokens, at state, or at whole vocabularies: our kernels, or a library's native layers. And products
# with packed weights, which are a kernel's alone.
KERNEL_OPS = frozenset({
    Op.EMBED, Op.PACKED_LINEAR, Op.GATHER_ROWS, Op.TOKEN_POSITIONS, Op.ROPE_ANGLES, Op.ATTEND, Op.CONV_COMMIT,
    Op.CAUSAL_CONV, Op.GATED_DELTA_RULE, Op.DELTA_FOLD, Op.ARG_MAX, Op.TOP_K, Op.LOG_SUM_EXP,
})  # fmt: skip


class Lowering(StrEnum):
    """What a network holds: all row operations between two kernel calls, or matrix products alone. Builders that fuse
    well (TensorRT-RTX, 10 and later) get the first; TensorRT 8.6 makes many small kernels of it, so it gets the second.
    """

    ROWS = "rows"
    PRODUCTS = "products"

    @property
    def kernel_ops(self) -> frozenset[Op]:
        return KERNEL_OPS if self is Lowering.ROWS else frozenset(Op) - {Op.LINEAR, Op.FUSED_LINEAR}


# These write into the state that they are given, so they are wanted for themselves.
STATE_OPS = frozenset({Op.ATTEND, Op.CONV_COMMIT, Op.CAUSAL_CONV, Op.GATED_DELTA_RULE, Op.DELTA_FOLD})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Value:
    """A tensor of the graph; identity is the object. `producer` is None for a graph input, which `name` then names.

    Nothing here has a repr of its own: it would write out all that led to the value.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    name: str = ""
    producer: Node | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[2:]

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Node:
    """One op call. `attrs` are the Python arguments (numbers, tuples, enums) in the order of `Ops`' signature."""

    op: Op
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...] = ()
    attrs: tuple[Hashable, ...] = ()
    outputs: list[Value] = field(default_factory=list)

    def emit(self, *specs: tuple[tuple[int, ...], Dtype]) -> tuple[Value, ...]:
        """Create the outputs, once: (shape, dtype) each."""
        self.outputs.extend(Value(shape, dtype, "", self) for shape, dtype in specs)
        return tuple(self.outputs)


@dataclass(frozen=True, slots=True)
class Graph:
    """`nodes` in execution order; `inputs` and `outputs` by name."""

    nodes: tuple[Node, ...]
    inputs: dict[str, Value]
    outputs: dict[str, Value]
