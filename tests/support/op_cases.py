"""Parity cases for every op: inputs, how the op is called, and what plain float64 loops make of them.

A case serves every backend: `call` takes ops and the backend's own tensors for `inputs`, in order, and returns the
outputs as a tuple; `expected` takes the numpy inputs. Weights are in the call. An op without a case fails the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, KvScales, Nvfp4Weight
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending, KvCache, KvDtype
from tests.support import naive

E4M3 = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True)
class OpCase:
    """`tolerance` is absolute and relative."""

    op: str
    name: str
    inputs: dict[str, np.ndarray]
    call: Callable[..., tuple[Any, ...]]
    expected: Callable[..., tuple[np.ndarray, ...]]
    tolerance: float = 2e-5

    def __str__(self) -> str:
        return f"{self.op}[{self.name}]"


def _normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def dense(seed: int, *shape: int, scale: float = 1.0) -> DenseWeight:
    return DenseWeight(_normal(seed, *shape, scale=scale).astype(ml_dtypes.bfloat16))


def _float64(weight: DenseWeight) -> np.ndarray:
    return weight.data.astype(np.float64)


# --- tokens, projections, pointwise ---


def _pointwise() -> list[OpCase]:
    table, gain, bias = dense(1, 11, 8), dense(2, 8), dense(3, 6)
    weight, other = dense(4, 6, 8), dense(5, 10, 8)
    x, y = _normal(6, 2, 3, 8), _normal(7, 2, 3, 8, scale=3)
    wide = {"x": np.array([[-100, -20, 0, 20, 90]], np.float32), "y": np.ones((1, 5), np.float32)}
    w, o = _float64(weight), _float64(other)
    heads = {"x": _normal(8, 2, 3, 4, 8), "gate": _normal(9, 2, 3, 4, 8)}
    return [
        OpCase("embed", "rows", {"ids": _ints([0, 10, 3], [3, 3, 1])}, lambda ops, ids: (ops.embed(table, ids),),
               lambda ids: (_float64(table)[ids],)),
        OpCase("linear", "plain", {"x": x}, lambda ops, x: (ops.linear(x, weight),), lambda x: (x @ w.T,)),
        OpCase("linear", "bias", {"x": x}, lambda ops, x: (ops.linear(x, weight, bias),),
               lambda x: (x @ w.T + _float64(bias),)),
        OpCase("linear", "tied to the embedding", {"x": x, "ids": _ints([1, 2])},
               lambda ops, x, ids: (ops.embed(table, ids), ops.linear(x, table)),
               lambda x, ids: (_float64(table)[ids], x @ _float64(table).T)),
        OpCase("fused_linear", "two, one with bias", {"x": x},
               lambda ops, x: ops.fused_linear(x, (weight, other), (bias, None)),
               lambda x: (x @ w.T + _float64(bias), x @ o.T)),
        OpCase("rms_norm", "plain", {"x": x}, lambda ops, x: (ops.rms_norm(x, gain, 1e-6, zero_centred=False),),
               lambda x: (naive.rms_norm(x, _float64(gain), 1e-6),)),
        OpCase("rms_norm", "zero-centred, both of one weight", {"x": x},
               lambda ops, x: (ops.rms_norm(x, gain, 1e-5, zero_centred=True),
                               ops.rms_norm(x, gain, 1e-5, zero_centred=False)),
               lambda x: (naive.rms_norm(x, 1 + _float64(gain), 1e-5), naive.rms_norm(x, _float64(gain), 1e-5))),
        OpCase("gated_rms_norm", "heads", heads, lambda ops, x, gate: (ops.gated_rms_norm(x, gate, gain, 1e-6),),
               lambda x, gate: (naive.rms_norm(x, _float64(gain), 1e-6) * naive.silu(gate),)),
        OpCase("l2_norm", "scaled, with a zero row", {"x": np.concatenate((x, np.zeros_like(x)))},
               lambda ops, x: (ops.l2_norm(x, 1e-6, 0.25),), lambda x: (naive.l2_norm(x, 1e-6, 0.25),)),
        OpCase("swiglu", "usual", {"x": y, "up": x}, lambda ops, x, up: (ops.swiglu(x, up),),
               lambda x, up: (naive.silu(x) * up,)),
        OpCase("swiglu", "far out", wide, lambda ops, x, y: (ops.swiglu(x, y),), lambda x, y: (naive.silu(x) * y,)),
        OpCase("sigmoid_gate", "usual", {"x": x, "gate": y}, lambda ops, x, gate: (ops.sigmoid_gate(x, gate),),
               lambda x, gate: (x * naive.sigmoid(gate),)),
        OpCase("sigmoid_gate", "far out", {"x": wide["y"], "gate": wide["x"]},
               lambda ops, x, gate: (ops.sigmoid_gate(x, gate),), lambda x, gate: (x * naive.sigmoid(gate),)),
        OpCase("add", "usual", {"a": x, "b": y}, lambda ops, a, b: (ops.add(a, b),), lambda a, b: (a + b,)),
    ]  # fmt: skip


def _quantized() -> list[OpCase]:
    rng = np.random.default_rng(20)
    codes = rng.integers(0, 256, (6, 16), np.uint8)
    blocks = (rng.random((6, 2)) * 4 + 0.5).astype(E4M3)
    nvfp4 = Nvfp4Weight(codes, blocks, np.float32(0.01))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    unpacked = np.empty((6, 32))
    for out, index in np.ndindex(6, 32):
        byte = int(codes[out, index // 2])
        unpacked[out, index] = (
            values[byte & 15 if index % 2 == 0 else byte >> 4] * float(blocks[out, index // 16]) * 0.01
        )
    fp8 = Fp8Weight(_normal(21, 6, 32).astype(E4M3), np.float32(0.3))
    x = {"x": _normal(22, 2, 1, 32)}
    return [
        OpCase("linear", "nvfp4", x, lambda ops, x: (ops.linear(x, nvfp4),), lambda x: (x @ unpacked.T,)),
        OpCase("linear", "fp8", x, lambda ops, x: (ops.linear(x, fp8),),
               lambda x: (x @ (fp8.data.astype(np.float64) * 0.3).T,)),
    ]  # fmt: skip


# --- shape ---


def _shapes() -> list[OpCase]:
    x = {"x": _normal(30, 2, 3, 12)}
    return [
        OpCase("concat", "two widths", {"a": _normal(31, 2, 3, 4), "b": _normal(32, 2, 3, 5)},
               lambda ops, a, b: (ops.concat((a, b)),), lambda a, b: (np.concatenate((a, b), -1),)),
        OpCase("split", "three", x, lambda ops, x: ops.split(x, (2, 7, 3)),
               lambda x: (x[..., :2], x[..., 2:9], x[..., 9:])),
        OpCase("split_heads", "four", x, lambda ops, x: (ops.split_heads(x, 4),), lambda x: (x.reshape(2, 3, 4, 3),)),
        OpCase("merge_heads", "four", {"x": _normal(33, 2, 3, 4, 5)}, lambda ops, x: (ops.merge_heads(x),),
               lambda x: (x.reshape(2, 3, 20),)),
        OpCase("gather_rows", "per row", {**x, "index": _ints([2, 0], [1, 1])},
               lambda ops, x, index: (ops.gather_rows(x, index),),
               lambda x, index: (np.stack([x[b, index[b]] for b in range(2)]),)),
    ]  # fmt: skip


# --- attention ---


def _attention() -> list[OpCase]:
    inv_freq = np.array([1.0, 0.1, 0.01], np.float32)
    angles = _normal(40, 2, 3, 3)
    rope = {"x": _normal(41, 2, 3, 4, 10), "cos": np.cos(angles), "sin": np.sin(angles)}
    return [
        OpCase("token_positions", "two rows", {"start": _ints(5, 0), "ids": _ints([9, 9, 9], [9, 9, 9])},
               lambda ops, start, ids: (ops.token_positions(start, ids),),
               lambda start, ids: (np.array([[5, 6, 7], [0, 1, 2]]),)),
        OpCase("rope_angles", "far positions", {"positions": _ints([0, 1], [1000, 2047])},
               lambda ops, positions: ops.rope_angles(positions, inv_freq, 1.5),
               lambda positions: (1.5 * np.cos(positions[..., None] * inv_freq.astype(np.float64)),
                                  1.5 * np.sin(positions[..., None] * inv_freq.astype(np.float64))), 1e-4),
        OpCase("rotary", "six of ten dims", rope, lambda ops, x, cos, sin: (ops.rotary(x, cos, sin),),
               lambda x, cos, sin: (naive.rotary(x, cos, sin),)),
        _attend("one token, group of two", 1, _ints(0, 6), KvDtype.FLOAT32, 1.0),
        _attend("four tokens", 4, _ints(3, 4), KvDtype.FLOAT32, 1.0),
        _attend("float16 cache", 2, _ints(3, 0), KvDtype.FLOAT16, 1.0),
        _attend("bfloat16 cache", 2, _ints(3, 0), KvDtype.BFLOAT16, 1.0),
        _attend("fp8 cache", 3, _ints(0, 5), KvDtype.FP8, 0.25),
        _attend("fp8 cache, saturated", 2, _ints(0, 5), KvDtype.FP8, 0.001),
    ]  # fmt: skip


_STORED = {
    KvDtype.FLOAT32: np.float32,
    KvDtype.FLOAT16: np.float16,
    KvDtype.BFLOAT16: ml_dtypes.bfloat16,
    KvDtype.FP8: E4M3,
}


def _attend(name: str, num_tokens: int, start: np.ndarray, dtype: KvDtype, scale: float) -> OpCase:
    scales = KvScales(np.float32(scale), np.float32(scale))

    def stored(x: np.ndarray) -> np.ndarray:
        if dtype is KvDtype.FP8:
            return np.clip(x.astype(np.float32) / np.float32(scale), -448, 448).astype(E4M3).astype(np.float64) * scale
        return x.astype(_STORED[dtype]).astype(np.float64)

    def call(ops: Any, q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, start: Any) -> tuple[Any, ...]:
        out, cache = ops.attend((q, k, v), KvCache(k_cache, v_cache, dtype, scales), start, 0.4)
        return out, cache.k, cache.v

    def expected(q, k, v, k_cache, v_cache, start):
        values = [cache.astype(np.float64) * scale for cache in (k_cache, v_cache)]
        out, k_after, v_after = naive.attend(q, k, v, *values, start, 0.4, stored)
        return out, k_after / scale, v_after / scale

    shape = (2, num_tokens, 2, 8)
    inputs = {
        "q": _normal(42, 2, num_tokens, 4, 8),
        "k": _normal(43, *shape),
        "v": _normal(44, *shape),
        "k_cache": (_normal(45, 2, 2, 8, 8) / scale).clip(-448, 448).astype(_STORED[dtype]),
        "v_cache": (_normal(46, 2, 2, 8, 8) / scale).clip(-448, 448).astype(_STORED[dtype]),
        "start": start,
    }
    return OpCase("attend", name, inputs, call, expected)


# --- Gated DeltaNet ---


def _delta() -> list[OpCase]:
    conv, a_log, dt_bias = dense(50, 6, 1, 4), dense(51, 4), dense(52, 4)
    tail = {"tail": _normal(53, 3, 3, 6), "pending": _normal(54, 3, 5, 6), "commit": _ints(0, 2, 5)}
    gates = {"a": _normal(55, 2, 3, 4, scale=4), "b": _normal(56, 2, 3, 4)}
    return [
        OpCase("conv_commit", "none, some, all", tail, lambda ops, t, p, n: (ops.conv_commit(t, p, n),),
               lambda tail, pending, commit: (naive.conv_commit(tail, pending, commit),)),
        OpCase("causal_conv", "five tokens", {"x": _normal(57, 2, 5, 6), "tail": _normal(58, 2, 3, 6)},
               lambda ops, x, tail: (ops.causal_conv(x, tail, conv),),
               lambda x, tail: (naive.causal_conv(x.astype(np.float64), tail, _float64(conv)),)),
        OpCase("delta_gates", "usual", gates, lambda ops, a, b: ops.delta_gates(a, b, a_log, dt_bias),
               lambda a, b: (-np.exp(_float64(a_log)) * np.logaddexp(0, a + _float64(dt_bias)), naive.sigmoid(b))),
        _rule("one token after nothing", 1, 3, (0, 0)),
        _rule("four tokens, rows fold apart", 4, 4, (0, 3)),
        _rule("six tokens after one", 6, 1, (1, 1)),
        _rule("eight tokens", 8, 6, (6, 2)),
        _rule("twelve tokens", 12, 2, (2, 1)),
        _rule("a chunk of 64", 64, 1, (0, 0)),
        _rule("64 equal keys", 64, 4, (4, 4), equal_keys=True),
        _rule("gates that close", 6, 6, (6, 2), log_g=-50.0),
        _rule("gates that close, 40 tokens", 40, 6, (6, 2), log_g=-30.0),
        _fold("all of the rows' counts", (0, 1, 3)),
        _fold("gates that close", (3, 1, 3), log_g=-50.0),
    ]  # fmt: skip


def _tokens(
    seed: int, num_rows: int, num_tokens: int, log_g: float | None, *, equal_keys: bool
) -> dict[str, np.ndarray]:
    """Two key heads of 5, four value heads of 7."""
    key_tokens = 1 if equal_keys else num_tokens
    k = np.repeat(_normal(seed, num_rows, key_tokens, 2, 5), num_tokens // key_tokens, axis=1)
    gate = -np.abs(_normal(seed + 1, num_rows, num_tokens, 4)) * (0.1 if log_g is None else -log_g)
    return {
        "q": naive.l2_norm(_normal(seed + 2, num_rows, num_tokens, 2, 5), 1e-6, 5**-0.5),
        "k": naive.l2_norm(k, 1e-6, 1.0),
        "v": _normal(seed + 3, num_rows, num_tokens, 4, 7),
        "log_g": gate * (0.01 if equal_keys else 1.0),
        "beta": naive.sigmoid(_normal(seed + 4, num_rows, num_tokens, 4) + (4.0 if equal_keys else 0.0)),
    }


def _rule(
    name: str,
    num_tokens: int,
    num_pending: int,
    commit: tuple[int, int],
    *,
    log_g: float | None = None,
    equal_keys: bool = False,
) -> OpCase:
    new = _tokens(60, 2, num_tokens, log_g, equal_keys=equal_keys)
    old = _tokens(70, 2, num_pending, log_g, equal_keys=False)
    inputs = {
        **new,
        "state": _normal(80, 2, 4, 5, 7),
        "old_k": old["k"],
        "old_u": old["v"],
        "old_log_g": old["log_g"],
        "commit": _ints(*commit),
    }

    def call(ops, q, k, v, log_g, beta, state, old_k, old_u, old_log_g, commit):
        pending = DeltaPending(old_k, old_u, old_log_g)
        out, folded, left = ops.gated_delta_rule(DeltaInputs(q, k, v, log_g, beta), state, pending, commit)
        return out, folded, left.k, left.u, left.log_g

    def expected(q, k, v, log_g, beta, state, old_k, old_u, old_log_g, commit):
        folded = naive.delta_fold(state.astype(np.float64), old_k, old_u, old_log_g, commit)
        out, u = naive.delta_rule(folded, q, k, v.astype(np.float64), log_g, beta)
        return out, folded, k, u, log_g

    return OpCase("gated_delta_rule", name, inputs, call, expected)


def _fold(name: str, commit: tuple[int, ...], log_g: float | None = None) -> OpCase:
    old = _tokens(90, len(commit), 3, log_g, equal_keys=False)
    inputs = {
        "state": _normal(91, len(commit), 4, 5, 7),
        "k": old["k"],
        "u": old["v"],
        "log_g": old["log_g"],
        "commit": _ints(*commit),
    }
    return OpCase(
        "delta_fold",
        name,
        inputs,
        lambda ops, state, k, u, log_g, commit: (ops.delta_fold(state, DeltaPending(k, u, log_g), commit),),
        lambda state, k, u, log_g, commit: (naive.delta_fold(state.astype(np.float64), k, u, log_g, commit),),
    )


# --- scores ---


def _scores() -> list[OpCase]:
    tied = np.array([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0], [-5, -1, -2, -1, -9]], np.float32)
    large = {"x": np.array([[1000, 999, -1000], [-2, -3, -4]], np.float32)}
    return [
        OpCase("arg_max", "ties by lowest id", {"x": tied}, lambda ops, x: (ops.arg_max(x),),
               lambda x: (np.array([1, 0, 1]),)),
        OpCase("top_k", "ties by lowest id", {"x": tied}, lambda ops, x: ops.top_k(x, 3),
               lambda x: (np.array([[3, 3, 3], [0, 0, 0], [-1, -1, -2]]), np.array([[1, 2, 4], [0, 1, 2], [1, 3, 2]]))),
        OpCase("log_sum_exp", "large values", large, lambda ops, x: (ops.log_sum_exp(x),),
               lambda x: (np.logaddexp.reduce(x.astype(np.float64), axis=-1),)),
    ]  # fmt: skip


def op_cases() -> list[OpCase]:
    return [*_pointwise(), *_quantized(), *_shapes(), *_attention(), *_delta(), *_scores()]
