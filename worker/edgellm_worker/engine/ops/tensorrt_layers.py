"""A TensorRT network under construction, with the few typed building blocks the lowerings need.

`Layers` hides what differs between library versions: strongly typed networks take the tensors' types as they are; in
TensorRT 8.6 every layer is pinned to its output's type, or the builder would run float32 norms in float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Dtype
from edgellm_worker.engine.trt import Library

_DATA_TYPES = {Dtype.FLOAT32: "FLOAT", Dtype.FLOAT16: "HALF", Dtype.INT32: "INT32", Dtype.FP8: "FP8"}


class Layers:
    """Tensors in, tensors out; `tensor` means the library's ITensor throughout."""

    def __init__(self, library: Library, network: Any) -> None:
        self.library = library
        self.network = network
        self._trt = library.module
        self._constants: list[Array] = []  # the network keeps pointers into these until it is built

    # --- ends ---

    def data_type(self, dtype: Dtype) -> Any:
        return getattr(self._trt.DataType, _DATA_TYPES[dtype])

    def input(self, name: str, shape: tuple[int, ...], data_type: Any) -> Any:
        return self.network.add_input(name, data_type, shape)

    def output(self, tensor: Any, name: str, data_type: Any) -> None:
        """Mark a copy: a tensor that is an input too, or an output already, cannot be marked under a second name."""
        copy = self.out(self.network.add_identity(tensor), data_type)
        copy.name = name
        self.network.mark_output(copy)
        if not self.library.is_strongly_typed:
            copy.dtype = data_type
            copy.allowed_formats = 1 << int(self._trt.TensorFormat.LINEAR)

    def mark(self, tensor: Any, name: str) -> None:
        """Mark the tensor itself."""
        tensor.name = name
        self.network.mark_output(tensor)

    def out(self, layer: Any, data_type: Any = None) -> Any:
        """The layer's first output; pins the type where networks are weakly typed."""
        if layer is None:
            raise BuildError(f"{self.library.name} refused a layer; its log says why")
        tensor = layer.get_output(0)
        is_floating = data_type in (self._trt.DataType.FLOAT, self._trt.DataType.HALF)
        if is_floating and not self.library.is_strongly_typed:
            layer.precision = data_type
            layer.set_output_type(0, data_type)
        return tensor

    def constant(self, value: Array) -> Any:
        array = np.ascontiguousarray(value)
        self._constants.append(array)
        return self.network.add_constant(tuple(array.shape), array).get_output(0)

    def scalar(self, value: float, rank: int, data_type: Any) -> Any:
        dtype = np.float16 if data_type == self._trt.DataType.HALF else np.float32
        return self.constant(np.full((1,) * rank, value, dtype))

    # --- arithmetic ---

    def cast(self, tensor: Any, dtype: Dtype) -> Any:
        data_type = self.data_type(dtype)
        if tensor.dtype == data_type:
            return tensor
        layer = self.network.add_cast(tensor, data_type)
        if not self.library.is_strongly_typed:
            layer.set_output_type(0, data_type)
        return layer.get_output(0)

    def binary(self, a: Any, b: Any, operation: str) -> Any:
        kind = getattr(self._trt.ElementWiseOperation, operation)
        return self.out(self.network.add_elementwise(a, b, kind), a.dtype)

    def add(self, a: Any, b: Any) -> Any:
        return self.binary(a, b, "SUM")

    def sub(self, a: Any, b: Any) -> Any:
        return self.binary(a, b, "SUB")

    def mul(self, a: Any, b: Any) -> Any:
        return self.binary(a, b, "PROD")

    def scale(self, a: Any, factor: float) -> Any:
        return self.mul(a, self.scalar(factor, len(a.shape), a.dtype))

    def offset(self, a: Any, term: float) -> Any:
        return self.add(a, self.scalar(term, len(a.shape), a.dtype))

    def unary(self, a: Any, operation: str) -> Any:
        return self.out(self.network.add_unary(a, getattr(self._trt.UnaryOperation, operation)), a.dtype)

    def sigmoid(self, a: Any) -> Any:
        return self.out(self.network.add_activation(a, self._trt.ActivationType.SIGMOID), a.dtype)

    def softplus(self, a: Any) -> Any:
        """log(1 + e^a) = max(a, 0) + log(1 + e^-|a|): no overflow, and type-stable in every version."""
        positive = self.binary(a, self.scalar(0.0, len(a.shape), a.dtype), "MAX")
        small = self.unary(self.unary(self.unary(a, "ABS"), "NEG"), "EXP")
        return self.add(positive, self.unary(self.offset(small, 1.0), "LOG"))

    def select(self, condition: Any, chosen: Any, other: Any) -> Any:
        return self.out(self.network.add_select(condition, chosen, other), chosen.dtype)

    def silu(self, a: Any) -> Any:
        return self.mul(a, self.sigmoid(a))

    def mean_last(self, a: Any, *, is_sum: bool = False) -> Any:
        return self.reduce_last(a, "SUM" if is_sum else "AVG")

    def reduce_last(self, a: Any, operation: str) -> Any:
        kind = getattr(self._trt.ReduceOperation, operation)
        return self.out(self.network.add_reduce(a, kind, 1 << (len(a.shape) - 1), True), a.dtype)

    def top_k(self, a: Any, count: int) -> tuple[Any, Any]:
        """The largest of the last dimension, descending, and their int32 indices."""
        layer = self.network.add_topk(a, self._trt.TopKOperation.MAX, count, 1 << (len(a.shape) - 1))
        if layer is None:
            raise BuildError(f"{self.library.name} refused a top-k of {count}")
        return layer.get_output(0), layer.get_output(1)

    def rsqrt(self, a: Any) -> Any:
        return self.unary(self.unary(a, "SQRT"), "RECIP")

    def matmul(self, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Any:
        op = self._trt.MatrixOperation
        kinds = [op.TRANSPOSE if flag else op.NONE for flag in (transpose_a, transpose_b)]
        return self.out(self.network.add_matrix_multiply(a, kinds[0], b, kinds[1]), a.dtype)

    def softmax_last(self, a: Any) -> Any:
        layer = self.network.add_softmax(a)
        layer.axes = 1 << (len(a.shape) - 1)
        return self.out(layer, a.dtype)

    # --- attention, in libraries that have it ---

    def update_cache(self, cache: Any, update: Any, start: Any) -> Any:
        """The cache [B, H, L, d] with update [B, H, N, d] at positions start[b] on, in its own memory."""
        return self.out(self.network.add_kv_cache_update(cache, update, start, self._trt.KVCacheMode.LINEAR))

    def attention(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        """softmax(q k^T) v where the bool mask [B, 1, N, L] is set; q [B, H, N, d], k and v [B, H_kv, L, d]."""
        trt = self._trt
        layer = self.network.add_attention_v2(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE)
        tensor = self.out(layer)
        layer.mask = mask
        layer.decomposable = True  # a target without a fused kernel for this head size still compiles
        return tensor

    def quantize(self, a: Any, scale: float) -> Any:
        """To FP8 e4m3: a / scale."""
        return self.out(self.network.add_quantize(a, self._scale(scale), self.data_type(Dtype.FP8)))

    def dequantize(self, a: Any, scale: float) -> Any:
        return self.out(self.network.add_dequantize(a, self._scale(scale), self.data_type(Dtype.FLOAT16)))

    def _scale(self, scale: float) -> Any:
        return self.constant(np.array(scale, np.float32))

    # --- shape ---

    def reshape(self, a: Any, shape: tuple[int, ...]) -> Any:
        """`shape` may hold one -1; 0 is not used (it would mean "as before")."""
        layer = self.network.add_shuffle(a)
        layer.reshape_dims = shape
        return self.out(layer, a.dtype)

    def transpose(self, a: Any, order: tuple[int, ...]) -> Any:
        layer = self.network.add_shuffle(a)
        layer.first_transpose = order
        return self.out(layer, a.dtype)

    def concat(self, tensors: list[Any], axis: int) -> Any:
        layer = self.network.add_concatenation(tensors)
        layer.axis = axis
        return self.out(layer, tensors[0].dtype)

    def take(self, a: Any, axis: int, start: int, size: int) -> Any:
        """a[..., start:start+size, ...] along `axis`, of a tensor whose shape is static."""
        shape = tuple(size if index == axis else length for index, length in enumerate(a.shape))
        starts = tuple(start if index == axis else 0 for index in range(len(shape)))
        return self.out(self.network.add_slice(a, starts, shape, (1,) * len(shape)), a.dtype)

    def gather(self, a: Any, index: Any) -> Any:
        """a[index] of the first dimension, `index` int32 of one dimension."""
        return self.out(self.network.add_gather(a, index, 0), a.dtype)

    def take_last(self, a: Any, start: int, size: int) -> Any:
        """a[..., start:start+size]; the leading dimension may be dynamic."""
        rank = len(a.shape)
        starts = (0,) * (rank - 1) + (start,)
        if a.shape[0] >= 0:
            layer = self.network.add_slice(a, starts, (*tuple(a.shape)[:-1], size), (1,) * rank)
            return self.out(layer, a.dtype)
        layer = self.network.add_slice(a, starts, (1,) * rank, (1,) * rank)
        fixed = np.array([*tuple(a.shape)[1:-1], size], np.int32)
        layer.set_input(2, self.concat([self._leading(a), self.constant(fixed)], 0))
        return self.out(layer, a.dtype)

    def _leading(self, a: Any) -> Any:
        shape = self.network.add_shape(a).get_output(0)
        if self.library.version >= (10, 0, 0) or self.library.is_strongly_typed:
            shape = self.cast(shape, Dtype.INT32)
        return self.network.add_slice(shape, (0,), (1,), (1,)).get_output(0)
