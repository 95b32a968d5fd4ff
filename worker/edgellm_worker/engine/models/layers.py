"""The parts that the families share, as weights plus what to do with them. Everything is written over `Ops[T]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgellm_worker.engine.checkpoint.weights import Weight
from edgellm_worker.engine.models.config import AttentionConfig, DeltaNetConfig, ModelConfig
from edgellm_worker.engine.models.source import WeightSource
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending, KvCache, Ops

T = TypeVar("T")

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetState(Generic[T]):
    """One Gated DeltaNet layer's memory of B rows.

    state         float32 [B, H_v, d_k, d_v], before the last pass
    tail          [B, K-1, C], the convolution's last inputs before the last pass
    conv_pending  [B, N, C], the last pass's convolution inputs
    pending       the last pass's deltas
    """

    state: T
    tail: T
    conv_pending: T
    pending: DeltaPending[T]


@dataclass(frozen=True, slots=True)
class Pass(Generic[T]):
    """What all layers of one pass share. start, commit int32 [B]; cos, sin [B, N, R/2]."""

    start: T
    commit: T
    cos: T
    sin: T


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Weight
    eps: float
    is_zero_centred: bool

    def run(self, ops: Ops[T], x: T) -> T:
        return ops.rms_norm(x, self.weight, self.eps, zero_centred=self.is_zero_centred)


@dataclass(frozen=True, slots=True)
class Projection:
    """`bias` is None where the checkpoint has none."""

    weight: Weight
    bias: Weight | None

    def run(self, ops: Ops[T], x: T) -> T:
        return ops.linear(x, self.weight, self.bias)


def fused(ops: Ops[T], x: T, projections: Sequence[Projection]) -> tuple[T, ...]:
    return ops.fused_linear(x, [p.weight for p in projections], [p.bias for p in projections])


def read_norm(source: WeightSource, name: str, config: ModelConfig) -> Norm:
    return Norm(source.weight(name), config.rms_norm_eps, config.has_zero_centred_norms)


def read_projection(source: WeightSource, name: str) -> Projection:
    bias = f"{name}.bias"
    return Projection(source.weight(name), source.array(bias) if source.has(bias) else None)


@dataclass(frozen=True, slots=True)
class Mlp:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    gate: Projection
    up: Projection
    down: Projection

    def run(self, ops: Ops[T], x: T) -> T:
        gate, up = fused(ops, x, (self.gate, self.up))
        return self.down.run(ops, ops.swiglu(gate, up))


def read_mlp(source: WeightSource, prefix: str) -> Mlp:
    return Mlp(
        gate=read_projection(source, f"{prefix}.gate_proj"),
        up=read_projection(source, f"{prefix}.up_proj"),
        down=read_projection(source, f"{prefix}.down_proj"),
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal grouped-query attention; with an output gate and per-head norms where the family has them."""

    config: AttentionConfig
    query: Projection
    key: Projection
    value: Projection
    out: Projection
    query_norm: Norm | None
    key_norm: Norm | None

    def run(self, ops: Ops[T], x: T, cache: KvCache[T], at: Pass[T]) -> tuple[T, KvCache[T]]:
        """`x` [B, N, D] -> ([B, N, D], the cache with these tokens in it)."""
        config = self.config
        flat_q, flat_k, flat_v = fused(ops, x, (self.query, self.key, self.value))
        q = ops.split_heads(flat_q, config.num_heads)
        gate = None
        if config.is_gated:
            q, gate = ops.split(q, (config.head_dim, config.head_dim))
        k = ops.split_heads(flat_k, config.num_kv_heads)
        v = ops.split_heads(flat_v, config.num_kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm.run(ops, q), self.key_norm.run(ops, k)
        q, k = ops.rotary(q, at.cos, at.sin), ops.rotary(k, at.cos, at.sin)
        mixed, cache = ops.attend((q, k, v), cache, at.start, config.head_dim**-0.5)
        y = ops.merge_heads(mixed)
        if gate is not None:
            y = ops.sigmoid_gate(y, ops.merge_heads(gate))
        return self.out.run(ops, y), cache


def read_attention(source: WeightSource, prefix: str, config: ModelConfig) -> Attention:
    has_norms = config.attention.has_qk_norm
    return Attention(
        config=config.attention,
        query=read_projection(source, f"{prefix}.q_proj"),
        key=read_projection(source, f"{prefix}.k_proj"),
        value=read_projection(source, f"{prefix}.v_proj"),
        out=read_projection(source, f"{prefix}.o_proj"),
        query_norm=read_norm(source, f"{prefix}.q_norm", config) if has_norms else None,
        key_norm=read_norm(source, f"{prefix}.k_norm", config) if has_norms else None,
    )


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated DeltaNet: projections, causal convolution, the gated delta rule, gated norm, output projection."""

    config: DeltaNetConfig
    qkv: Projection
    z: Projection
    a: Projection
    b: Projection
    out: Projection
    conv: Weight
    a_log: Weight
    dt_bias: Weight
    norm: Weight
    eps: float

    def run(self, ops: Ops[T], x: T, memory: DeltaNetState[T], at: Pass[T]) -> tuple[T, DeltaNetState[T]]:
        """`x` [B, N, D] -> ([B, N, D], memory with at.commit tokens of the last pass folded in and these pending)."""
        config = self.config
        qkv, z, b, a = fused(ops, x, (self.qkv, self.z, self.b, self.a))
        tail = ops.conv_commit(memory.tail, memory.conv_pending, at.commit)
        mixed = ops.causal_conv(qkv, tail, self.conv)
        inputs = self._inputs(ops, mixed, ops.delta_gates(a, b, self.a_log, self.dt_bias))
        out, state, pending = ops.gated_delta_rule(inputs, memory.state, memory.pending, at.commit)
        gate = ops.split_heads(z, config.num_value_heads)
        y = ops.merge_heads(ops.gated_rms_norm(out, gate, self.norm, self.eps))
        return self.out.run(ops, y), DeltaNetState(state, tail, qkv, pending)

    def _inputs(self, ops: Ops[T], mixed: T, gates: tuple[T, T]) -> DeltaInputs[T]:
        config = self.config
        key_size = config.num_key_heads * config.key_dim
        q, k, v = ops.split(mixed, (key_size, key_size, config.num_value_heads * config.value_dim))
        return DeltaInputs(
            q=ops.l2_norm(ops.split_heads(q, config.num_key_heads), _L2_EPS, config.key_dim**-0.5),
            k=ops.l2_norm(ops.split_heads(k, config.num_key_heads), _L2_EPS, 1.0),
            v=ops.split_heads(v, config.num_value_heads),
            log_g=gates[0],
            beta=gates[1],
        )


def fold(ops: Ops[T], memory: DeltaNetState[T], commit: T) -> DeltaNetState[T]:
    """Commit tokens of the last pass without running new ones. What stays pending must be given n = 0 next time."""
    return DeltaNetState(
        state=ops.delta_fold(memory.state, memory.pending, commit),
        tail=ops.conv_commit(memory.tail, memory.conv_pending, commit),
        conv_pending=memory.conv_pending,
        pending=memory.pending,
    )


def read_delta_net(source: WeightSource, prefix: str, config: ModelConfig, delta_net: DeltaNetConfig) -> DeltaNet:
    return DeltaNet(
        config=delta_net,
        qkv=read_projection(source, f"{prefix}.in_proj_qkv"),
        z=read_projection(source, f"{prefix}.in_proj_z"),
        a=read_projection(source, f"{prefix}.in_proj_a"),
        b=read_projection(source, f"{prefix}.in_proj_b"),
        out=read_projection(source, f"{prefix}.out_proj"),
        conv=source.weight(f"{prefix}.conv1d"),
        a_log=source.array(f"{prefix}.A_log"),
        dt_bias=source.array(f"{prefix}.dt_bias"),
        norm=source.weight(f"{prefix}.norm"),
        eps=config.rms_norm_eps,
    )
