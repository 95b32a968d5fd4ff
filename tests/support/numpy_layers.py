"""`Layers` over numpy arrays: what a lowering computes, without a compiler or a GPU. float16 is kept in float32, so that what
differs from the reference is the lowering and not the rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from edgellm_worker.engine.ops.graph import Dtype
from edgellm_worker.engine.ops.tensorrt_layers import Layers

Array = np.ndarray[Any, Any]

KEPT_AS = {
    Dtype.FLOAT32: np.float32,
    Dtype.FLOAT16: np.float32,
    Dtype.INT32: np.int32,
    Dtype.FP8: ml_dtypes.float8_e4m3fn,
}
BINARY = {
    "SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "MAX": np.maximum, "GREATER": np.greater, "LESS": np.less,
}  # fmt: skip
UNARY = {
    "EXP": np.exp, "LOG": np.log, "NEG": np.negative, "ABS": np.abs, "SQRT": np.sqrt, "RECIP": np.reciprocal,
    "COS": np.cos, "SIN": np.sin, "NOT": np.logical_not,
}  # fmt: skip
REDUCE = {"SUM": np.sum, "AVG": np.mean, "MAX": np.max}


class NumpyLayers(Layers):
    """`feeds` are network inputs by name; `outputs` holds what was marked."""

    def __init__(self, feeds: Mapping[str, Array]) -> None:
        self._feeds = feeds
        self.outputs: dict[str, Array] = {}

    def data_type(self, dtype: Dtype) -> Any:
        return KEPT_AS[dtype]

    def input(self, name: str, shape: tuple[int, ...], data_type: Any) -> Array:
        value = self._feeds[name]
        assert value.shape == tuple(shape), (name, value.shape, shape)
        assert value.dtype == data_type, (name, value.dtype, data_type)
        return value

    def output(self, tensor: Array, name: str, data_type: Any) -> None:
        assert name not in self.outputs
        assert tensor.dtype == data_type
        self.outputs[name] = tensor

    def mark(self, tensor: Array, name: str) -> None:
        self.output(tensor, name, tensor.dtype)

    def constant(self, value: Array) -> Array:
        return value

    def scalar(self, value: float, rank: int, data_type: Any) -> Array:
        return np.full((1,) * rank, value, data_type)

    def cast(self, tensor: Array, dtype: Dtype) -> Array:
        return tensor.astype(KEPT_AS[dtype], copy=False)

    def binary(self, a: Array, b: Array, operation: str) -> Array:
        assert a.ndim == b.ndim, "the library wants one rank"
        assert a.dtype == b.dtype
        return BINARY[operation](a, b)

    def unary(self, a: Array, operation: str) -> Array:
        return UNARY[operation](a)

    def sigmoid(self, a: Array) -> Array:
        return 1 / (1 + np.exp(-a))

    def select(self, condition: Array, chosen: Array, other: Array) -> Array:
        return np.where(condition, chosen, other)

    def reduce_last(self, a: Array, operation: str) -> Array:
        return REDUCE[operation](a, axis=-1, keepdims=True)

    def top_k(self, a: Array, count: int) -> tuple[Array, Array]:
        order = np.argsort(-a, axis=-1, kind="stable")[..., :count]
        return np.take_along_axis(a, order, -1), order.astype(np.int32)

    def matmul(self, a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        assert a.ndim == b.ndim, "the library wants one rank"
        return (a.swapaxes(-1, -2) if transpose_a else a) @ (b.swapaxes(-1, -2) if transpose_b else b)

    def softmax_last(self, a: Array) -> Array:
        weights = np.exp(a - a.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def update_cache(self, cache: Array, update: Array, start: Array) -> Array:
        assert cache.dtype == update.dtype == np.float32, "IKVCacheUpdate takes no FP8"
        written = cache.copy()
        for row, first in enumerate(start):
            written[row, :, first : first + update.shape[2]] = update[row]
        return written

    def attention(self, q: Array, k: Array, v: Array, mask: Array) -> Array:
        group = q.shape[1] // k.shape[1]
        keys, values = (np.repeat(cache, group, axis=1) for cache in (k, v))
        scores = np.where(mask, q @ keys.swapaxes(-1, -2), np.float32(-1e30))
        return self.softmax_last(scores) @ values

    def quantize(self, a: Array, scale: float) -> Array:
        return (a / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn)

    def dequantize(self, a: Array, scale: float) -> Array:
        return a.astype(np.float32) * np.float32(scale)

    def reshape(self, a: Array, shape: tuple[int, ...]) -> Array:
        return a.reshape(shape)

    def transpose(self, a: Array, order: tuple[int, ...]) -> Array:
        return a.transpose(order)

    def concat(self, tensors: list[Array], axis: int) -> Array:
        return np.concatenate(tensors, axis)

    def take(self, a: Array, axis: int, start: int, size: int) -> Array:
        return a.take(range(start, start + size), axis)

    def gather(self, a: Array, index: Array) -> Array:
        assert index.ndim == 1
        return a[index]

    def take_last(self, a: Array, start: int, size: int) -> Array:
        return a[..., start : start + size]
