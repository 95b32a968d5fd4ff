"""The ops on numpy arrays in float32: the living definition that every other backend is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.checkpoint.decode import decode as float32
from edgellm_worker.engine.checkpoint.weights import Array, Weight
from edgellm_worker.engine.ops import delta
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending, KvCache, KvDtype

STORAGE: Final[dict[KvDtype, np.dtype]] = {
    KvDtype.FLOAT32: np.dtype(np.float32),
    KvDtype.FLOAT16: np.dtype(np.float16),
    KvDtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    KvDtype.FP8: np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The array type of each cache dtype."""

_E4M3_MAX: Final = np.float32(448)
_E4M3: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class NumpyOps:
    """`Ops[Array]`. Each weight is decoded to float32 once and kept, so an instance belongs to one model.

    `decoded_bytes` is the memory of what was decoded so far.
    """

    def __init__(self) -> None:
        self.decoded_bytes = 0
        # The weights are kept beside what was made of them: their ids stay theirs.
        self._decoded: dict[tuple[object, ...], tuple[tuple[Weight, ...], Array]] = {}

    # --- tokens, projections, pointwise ---

    def embed(self, table: Weight, ids: Array) -> Array:
        return self._once(_table, table)[ids]

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        return self.fused_linear(x, (weight,), (bias,))[0]

    def fused_linear(self, x: Array, weights: Sequence[Weight], biases: Sequence[Weight | None]) -> tuple[Array, ...]:
        matrix = self._once(_stacked_inputs_first, *weights)
        y = (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[1])
        parts = self.split(y, [weight.shape[0] for weight in weights]) if len(weights) > 1 else (y,)
        for part, bias in zip(parts, biases, strict=True):
            if bias is not None:
                np.add(part, self._once(_table, bias), out=part)
        return parts

    def rms_norm(self, x: Array, weight: Weight, eps: float, *, zero_centred: bool) -> Array:
        gain = self._once(_one_plus if zero_centred else _table, weight)
        scale = np.add.reduce(np.square(x), axis=-1, keepdims=True)
        scale /= np.float32(x.shape[-1])
        scale += np.float32(eps)
        y: Array = x / np.sqrt(scale, out=scale)
        y *= gain
        return y

    def gated_rms_norm(self, x: Array, gate: Array, weight: Weight, eps: float) -> Array:
        return self.swiglu(gate, self.rms_norm(x, weight, eps, zero_centred=False))

    def l2_norm(self, x: Array, eps: float, scale: float) -> Array:
        sum_square = np.add.reduce(np.square(x), axis=-1, keepdims=True)
        y: Array = x * (np.float32(scale) / np.sqrt(sum_square + np.float32(eps)))
        return y

    def swiglu(self, gate: Array, up: Array) -> Array:
        y: Array = gate / _one_plus_exp_minus(gate)
        y *= up
        return y

    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        y: Array = x / _one_plus_exp_minus(gate)
        return y

    def add(self, a: Array, b: Array) -> Array:
        total: Array = a + b
        return total

    # --- shape ---

    def concat(self, xs: Sequence[Array]) -> Array:
        return np.concatenate(xs, axis=-1)

    def split(self, x: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
        parts, start = [], 0
        for size in sizes:
            parts.append(x[..., start : start + size])
            start += size
        return tuple(parts)

    def split_heads(self, x: Array, num_heads: int) -> Array:
        return x.reshape(*x.shape[:-1], num_heads, -1)

    def merge_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-2], -1)

    def gather_rows(self, x: Array, index: Array) -> Array:
        gathered: Array = x[np.arange(len(x))[:, None], index]
        return gathered

    # --- attention ---

    def token_positions(self, start: Array, ids: Array) -> Array:
        positions: Array = start[:, None] + np.arange(ids.shape[1], dtype=np.int32)
        return positions

    def rope_angles(self, positions: Array, inv_freq: Array, magnitude: float) -> tuple[Array, Array]:
        angles = positions[..., None].astype(np.float32) * inv_freq
        return np.cos(angles) * np.float32(magnitude), np.sin(angles) * np.float32(magnitude)

    def rotary(self, x: Array, cos: Array, sin: Array) -> Array:
        half = cos.shape[-1]
        cos, sin = cos[:, :, None], sin[:, :, None]
        low, high = x[..., :half], x[..., half : 2 * half]
        y = np.array(x, order="C")
        y[..., :half] = low * cos - high * sin
        y[..., half : 2 * half] = high * cos + low * sin
        return y

    def attend(
        self, qkv: tuple[Array, Array, Array], cache: KvCache[Array], start: Array, scale: float
    ) -> tuple[Array, KvCache[Array]]:
        q, k, v = qkv
        _store(cache.k, k, start, cache.scales.k_scale)
        _store(cache.v, v, start, cache.scales.v_scale)
        num_rows, num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, length = cache.k.shape[1:3]
        group = num_heads // num_kv_heads
        # [B, H_kv, group * N, d]: the query heads of one kv head are stacked into one product.
        stacked = (q * np.float32(scale)).reshape(num_rows, num_tokens, num_kv_heads, group, head_dim)
        stacked = stacked.transpose(0, 2, 3, 1, 4).reshape(num_rows, num_kv_heads, group * num_tokens, head_dim)
        scores = stacked @ _load(cache.k, cache.scales.k_scale).transpose(0, 1, 3, 2)
        scores = scores.reshape(num_rows, num_kv_heads * group, num_tokens, length)
        last_seen = start[:, None] + np.arange(num_tokens, dtype=np.int32)
        hidden = np.arange(length, dtype=np.int32) > last_seen[:, :, None]
        np.copyto(scores, -np.inf, where=hidden[:, None])
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= np.add.reduce(scores, axis=-1, keepdims=True)
        mixed = scores.reshape(num_rows, num_kv_heads, group * num_tokens, length) @ _load(
            cache.v, cache.scales.v_scale
        )
        mixed = mixed.reshape(num_rows, num_heads, num_tokens, head_dim)
        return np.ascontiguousarray(mixed.transpose(0, 2, 1, 3)), cache

    # --- Gated DeltaNet ---

    def conv_commit(self, tail: Array, pending: Array, commit: Array) -> Array:
        rows = commit[:, None] + np.arange(tail.shape[1], dtype=np.int32)
        return self.gather_rows(np.concatenate((tail, pending), axis=1), rows)

    def causal_conv(self, x: Array, tail: Array, weight: Weight) -> Array:
        taps = self._once(_taps, weight)  # [K, C]
        num_tokens = x.shape[1]
        inputs = np.concatenate((tail, x), axis=1)
        y: Array = inputs[:, :num_tokens] * taps[0]
        for j in range(1, len(taps)):
            y += inputs[:, j : j + num_tokens] * taps[j]
        y /= _one_plus_exp_minus(y)
        return y

    def delta_gates(self, a: Array, b: Array, a_log: Weight, dt_bias: Weight) -> tuple[Array, Array]:
        rate = self._once(_minus_exp, a_log)
        log_g: Array = rate * np.logaddexp(np.float32(0), a + self._once(_table, dt_bias))
        beta: Array = np.float32(1) / _one_plus_exp_minus(b)
        return log_g, beta

    def gated_delta_rule(
        self, inputs: DeltaInputs[Array], state: Array, pending: DeltaPending[Array], commit: Array
    ) -> tuple[Array, Array, DeltaPending[Array]]:
        folded = delta.fold(state, pending, commit)
        out, left = delta.run(inputs, folded)
        return out, folded, left

    def delta_fold(self, state: Array, pending: DeltaPending[Array], commit: Array) -> Array:
        return delta.fold(state, pending, commit)

    # --- scores ---

    def arg_max(self, x: Array) -> Array:
        best: Array = x.argmax(axis=-1).astype(np.int32)
        return best

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        ids = np.argsort(-x, axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(x, ids, axis=-1), ids.astype(np.int32)

    def log_sum_exp(self, x: Array) -> Array:
        top = x.max(axis=-1)
        total: Array = top + np.log(np.exp(x - top[..., None]).sum(axis=-1))
        return total

    def _once(self, decode: Callable[..., Array], *weights: Weight) -> Array:
        key = (decode, *map(id, weights))
        found = self._decoded.get(key)
        if found is None:
            found = self._decoded[key] = (weights, decode(*weights))
            self.decoded_bytes += found[1].nbytes
        return found[1]


def _table(weight: Weight) -> Array:
    return float32(weight)


def _one_plus(weight: Weight) -> Array:
    return np.float32(1) + float32(weight)


def _minus_exp(weight: Weight) -> Array:
    return -np.exp(float32(weight))


def _taps(weight: Weight) -> Array:
    return np.ascontiguousarray(float32(weight)[:, 0].T)


def _stacked_inputs_first(*weights: Weight) -> Array:
    """[out_i, in] each -> [in, sum out_i], the layout that few rows multiply fastest."""
    return np.ascontiguousarray(np.concatenate([float32(weight) for weight in weights]).T)


def _one_plus_exp_minus(x: Array) -> Array:
    """1 + exp(-x); infinite where exp overflows, which is what its reciprocal wants."""
    with np.errstate(over="ignore"):
        y: Array = np.exp(-x)
    y += np.float32(1)
    return y


def _store(cache: Array, new: Array, start: Array, scale: np.float32) -> None:
    """Cast new [B, N, H, d] into cache [B, H, L, d] at rows start[b] .. start[b] + N - 1."""
    if cache.dtype == STORAGE[KvDtype.FP8]:
        new = np.clip(new / scale, -_E4M3_MAX, _E4M3_MAX)
    num_tokens = new.shape[1]
    for row, (first, tokens) in enumerate(zip(start.tolist(), new.transpose(0, 2, 1, 3), strict=True)):
        cache[row, :, first : first + num_tokens] = tokens


def _load(cache: Array, scale: np.float32) -> NDArray[np.float32]:
    if cache.dtype == np.float32:
        return cache
    if cache.dtype == STORAGE[KvDtype.FP8]:
        values: NDArray[np.float32] = _E4M3[cache.view(np.uint8)] * scale
        return values
    return cache.astype(np.float32)
