"""The rows' state of the numpy executor: one set of arrays for all slots, reserved once.

KV caches [S, H_kv, capacity, d] per attention layer (the draft's among them), recurrent state, convolution tail and the
last verify pass's pending per Gated DeltaNet layer, and the base's hidden states of that pass for the draft head.
There is one recurrent state per slot, never one per verify position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.models.config import DeltaNetConfig
from edgellm_worker.engine.models.decoder import AttentionLayer, DeltaNetLayer, Layer
from edgellm_worker.engine.models.layers import DeltaNetState
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import DeltaPending, KvCache, KvDtype
from edgellm_worker.engine.ops.reference import STORAGE

Memory = KvCache[Array] | DeltaNetState[Array]


@dataclass(frozen=True, slots=True)
class StateShape:
    """`max_verify` is the longest verify pass: drafts + 1. Capacity is in tokens per row."""

    num_slots: int
    capacity: int
    max_verify: int
    kv_dtype: KvDtype


class NumpyState:
    def __init__(self, model: Model, shape: StateShape) -> None:
        self._base = [_reserve(model, layer, shape) for layer in model.base.layers]
        self._draft = None if model.mtp is None else _reserve_cache(model, model.mtp.layer, shape)
        self.hidden = np.zeros((shape.num_slots, shape.max_verify, model.config.hidden_size), np.float32)
        self._num_written = [0] * shape.num_slots
        self.memory_bytes = self._measure()

    def _measure(self) -> dict[str, int]:
        caches = [m for m in (*self._base, self._draft) if isinstance(m, KvCache)]
        deltas = [m for m in self._base if isinstance(m, DeltaNetState)]
        return {
            "kv_cache": sum(array.nbytes for cache in caches for array in (cache.k, cache.v)),
            "recurrent_state": sum(array.nbytes for delta in deltas for array in (delta.state, delta.tail)),
            "pending": sum(array.nbytes for delta in deltas for array in _pending(delta)) + self.hidden.nbytes,
        }

    def clear(self, slot: int) -> None:
        """Zeros everywhere a new row could meet old values, which might not even be numbers."""
        for array, axis in self._arrays():
            row = array[slot]
            if axis is None:
                row[...] = 0
            else:
                row[:, : self._num_written[slot]] = 0
        self._num_written[slot] = 0

    def swap(self, a: int, b: int) -> None:
        length = max(self._num_written[a], self._num_written[b])
        for array, axis in self._arrays():
            one, other = array[a], array[b]
            if axis is not None:
                one, other = one[:, :length], other[:, :length]
            kept = one.copy()
            one[...] = other
            other[...] = kept
        written = self._num_written
        written[a], written[b] = written[b], written[a]

    def base(self, rows: slice, commit: Array, attended: int) -> list[Memory]:
        """Views for a pass over these slots; only as much pending as is committed."""
        width = max(1, int(commit.max()))
        return [_view(memory, rows, width, attended) for memory in self._base]

    def store_base(self, rows: slice, after: Sequence[Memory]) -> None:
        """Caches were written in place; the rest is copied back."""
        for kept, new in zip(self._base, after, strict=True):
            if isinstance(kept, DeltaNetState) and isinstance(new, DeltaNetState):
                kept.state[rows] = new.state
                kept.tail[rows] = new.tail
                width = min(new.conv_pending.shape[1], kept.conv_pending.shape[1])
                for target, source in zip(_pending(kept), _pending(new), strict=True):
                    target[rows, :width] = source[:, :width]

    def draft(self, rows: slice, attended: int) -> KvCache[Array]:
        if self._draft is None:
            raise TypeError("this model has no draft head")
        return _view_cache(self._draft, rows, attended)

    def note_written(self, rows: slice, num_positions: Array) -> None:
        """Cache entries below these counts may have been written."""
        for slot, count in zip(range(rows.start, rows.stop), num_positions.tolist(), strict=True):
            self._num_written[slot] = max(self._num_written[slot], count)

    def _arrays(self) -> list[tuple[Array, int | None]]:
        """All arrays, slots first, with the axis of positions (after the slot's) where they have one."""
        arrays: list[tuple[Array, int | None]] = [(self.hidden, None)]
        for memory in (*self._base, self._draft):
            match memory:
                case KvCache(k, v):
                    arrays += [(k, 1), (v, 1)]
                case DeltaNetState():
                    arrays += [(array, None) for array in (memory.state, memory.tail, *_pending(memory))]
                case None:
                    pass
        return arrays


def _reserve(model: Model, layer: Layer, shape: StateShape) -> Memory:
    match layer:
        case AttentionLayer():
            return _reserve_cache(model, layer, shape)
        case DeltaNetLayer():
            return _reserve_delta(layer.mixer.config, shape)


def _reserve_cache(model: Model, layer: AttentionLayer, shape: StateShape) -> KvCache[Array]:
    attention = model.config.attention
    size = (shape.num_slots, attention.num_kv_heads, shape.capacity, attention.head_dim)
    storage = STORAGE[shape.kv_dtype]
    return KvCache(np.zeros(size, storage), np.zeros(size, storage), shape.kv_dtype, layer.kv_scales)


def _reserve_delta(config: DeltaNetConfig, shape: StateShape) -> DeltaNetState[Array]:
    def zeros(*size: int) -> Array:
        return np.zeros((shape.num_slots, *size), np.float32)

    return DeltaNetState(
        state=zeros(config.num_value_heads, config.key_dim, config.value_dim),
        tail=zeros(config.conv_kernel - 1, config.num_channels),
        conv_pending=zeros(shape.max_verify, config.num_channels),
        pending=DeltaPending(
            k=zeros(shape.max_verify, config.num_key_heads, config.key_dim),
            u=zeros(shape.max_verify, config.num_value_heads, config.value_dim),
            log_g=zeros(shape.max_verify, config.num_value_heads),
        ),
    )


def _pending(memory: DeltaNetState[Array]) -> tuple[Array, Array, Array, Array]:
    return memory.conv_pending, memory.pending.k, memory.pending.u, memory.pending.log_g


def _view(memory: Memory, rows: slice, width: int, attended: int) -> Memory:
    if isinstance(memory, KvCache):
        return _view_cache(memory, rows, attended)
    conv, k, u, log_g = (array[rows, :width] for array in _pending(memory))
    return DeltaNetState(memory.state[rows], memory.tail[rows], conv, DeltaPending(k, u, log_g))


def _view_cache(cache: KvCache[Array], rows: slice, attended: int) -> KvCache[Array]:
    return KvCache(cache.k[rows, :, :attended], cache.v[rows, :, :attended], cache.dtype, cache.scales)
