"""Row operations as TensorRT layers: one function per op, in a table. Every tensor is [M, ...], one row per token.

Weights are network *inputs*: a plan holds no weights, prefill and step share one resident copy, layers of one kind
share one plan, and a build takes seconds. What a weight needs as inputs is `weight_inputs`: the executor binds device
buffers of the same layout.

    DenseWeight   name          [out, in] float16 (norms, gates, biases: float32 vectors)
    Fp8Weight     name          [out, in] FP8,  name.scale float32 scalar
    Nvfp4Weight   name          [out, in] FP4,  name.block_scale [out, in/16] FP8, name.global_scale float32 scalar
                  the activation's global scale must be a build-time constant (the library says so), so it is part of
                  the network and of its structural key
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Dtype, Node, Op, Value
from edgellm_worker.engine.ops.tensorrt_layers import Layers

NVFP4_BLOCK = 16


@dataclass(slots=True)
class Emitter:
    """`tensors` maps values to network tensors; `weight_names` maps a node's weight groups to network inputs. Each part
    of a `joined` node's product is the whole of it.
    """

    layers: Layers
    joined: tuple[Node, ...] = ()
    tensors: dict[Value, Any] = field(default_factory=dict)
    weight_tensors: dict[str, Any] = field(default_factory=dict)

    def tensor(self, value: Value, dtype: Dtype | None = None) -> Any:
        return self.layers.cast(self.tensors[value], dtype or value.dtype)

    def vector(self, name: str, size: int, rank: int) -> Any:
        """A float32 weight vector, shaped to broadcast over the last of `rank` dimensions."""
        tensor = self.weight_input(name, (size,), self.layers.data_type(Dtype.FLOAT32))
        return self.layers.reshape(tensor, (1,) * (rank - 1) + (size,))

    def weight_input(self, name: str, shape: tuple[int, ...], data_type: Any) -> Any:
        if name not in self.weight_tensors:
            self.weight_tensors[name] = self.layers.input(name, shape, data_type)
        return self.weight_tensors[name]


RowLowering = Callable[[Emitter, Node, tuple[str, ...]], tuple[Any, ...]]


def emit_row_op(emitter: Emitter, node: Node, weight_names: tuple[str, ...]) -> None:
    """Add the layers of `node`; `weight_names` are the network inputs for its weights, in order."""
    tensors = ROW_LOWERINGS[node.op](emitter, node, weight_names)
    for value, tensor in zip(node.outputs, tensors, strict=True):
        emitter.tensors[value] = tensor


# --- products ---


def _linear(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    return (_product(e, node, names, node.weights[:1], node.weights[1:]),)


def _fused_linear(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    sizes = _sizes(node)
    product = _product(e, node, names, node.weights[: len(sizes)], node.weights[len(sizes) :])
    return (product,) * len(sizes) if node in e.joined else _slices(e.layers, product, sizes)


def _product(
    e: Emitter, node: Node, names: tuple[str, ...], weights: tuple[Weight, ...], biases: tuple[Weight, ...]
) -> Any:
    """The product x W^T + b with the weights of one fused product stacked along `out`."""
    x = e.tensor(node.inputs[0], Dtype.FLOAT16)
    y = PRODUCTS[type(weights[0])](e, x, names[0], weights)
    if biases:
        bias = e.vector(names[1], sum(bias.shape[0] for bias in biases), 2)
        y = e.layers.cast(e.layers.add(e.layers.cast(y, Dtype.FLOAT32), bias), Dtype.FLOAT16)
    return y


def _stacked(weights: tuple[Weight, ...]) -> tuple[int, int]:
    return sum(weight.shape[0] for weight in weights), weights[0].shape[1]


def _dense_product(e: Emitter, x: Any, name: str, weights: tuple[Weight, ...]) -> Any:
    w = e.weight_input(name, _stacked(weights), e.layers.data_type(Dtype.FLOAT16))
    return e.layers.matmul(x, w, transpose_b=True)


def _fp8_product(e: Emitter, x: Any, name: str, weights: tuple[Weight, ...]) -> Any:
    """Q/DQ: with a static activation scale the product itself runs in FP8, without one the weight is decoded."""
    layers, network = e.layers, e.layers.network
    half = layers.data_type(Dtype.FLOAT16)
    fp8 = layers.data_type(Dtype.FP8)
    w = e.weight_input(name, _stacked(weights), fp8)
    scale = e.weight_input(f"{name}.scale", (), layers.data_type(Dtype.FLOAT32))
    decoded = layers.out(network.add_dequantize(w, scale, half))
    if _input_scale(weights) is not None:
        x_scale = e.weight_input(f"{name}.input_scale", (), layers.data_type(Dtype.FLOAT32))
        x = layers.out(network.add_dequantize(layers.out(network.add_quantize(x, x_scale, fp8)), x_scale, half))
    return layers.matmul(x, decoded, transpose_b=True)


def _nvfp4_product(e: Emitter, x: Any, name: str, weights: tuple[Weight, ...]) -> Any:
    layers, network, trt = e.layers, e.layers.network, e.layers.library.module
    half, fp8 = layers.data_type(Dtype.FLOAT16), layers.data_type(Dtype.FP8)
    rows, width = _stacked(weights)
    w = e.weight_input(name, (rows, width), trt.DataType.FP4)
    block = e.weight_input(f"{name}.block_scale", (rows, width // NVFP4_BLOCK), fp8)
    scale = e.weight_input(f"{name}.global_scale", (), layers.data_type(Dtype.FLOAT32))
    decoded = layers.out(network.add_dequantize(w, layers.out(network.add_dequantize(block, scale, half)), half))
    input_scale = _input_scale(weights)
    if input_scale is not None:
        constant = layers.constant(np.array(input_scale, np.float32))
        quantize = network.add_dynamic_quantize(x, 1, NVFP4_BLOCK, trt.DataType.FP4, fp8)
        quantize.set_input(1, constant)
        x_scale = layers.out(network.add_dequantize(quantize.get_output(1), constant, half))
        x = layers.out(network.add_dequantize(quantize.get_output(0), x_scale, half))
    return layers.matmul(x, decoded, transpose_b=True)


def _input_scale(weights: tuple[Weight, ...]) -> np.float32 | None:
    match weights:
        case (Fp8Weight(input_scale=scale) | Nvfp4Weight(input_scale=scale),):
            return scale
        case _:
            raise BuildError("quantized weights are not stacked: each has scales of its own")


PRODUCTS: dict[type[Weight], Callable[[Emitter, Any, str, tuple[Weight, ...]], Any]] = {
    DenseWeight: _dense_product,
    Fp8Weight: _fp8_product,
    Nvfp4Weight: _nvfp4_product,
}


# --- norms and gates ---


def _rms(e: Emitter, x: Any, eps: float) -> Any:
    layers = e.layers
    return layers.mul(x, layers.rsqrt(layers.offset(layers.mean_last(layers.mul(x, x)), eps)))


def _rms_norm(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    eps, zero_centred = _number(node, 0), bool(node.attrs[1])
    x = e.tensor(node.inputs[0], Dtype.FLOAT32)
    weight = e.vector(names[0], x.shape[-1], len(x.shape))
    if zero_centred:
        weight = e.layers.offset(weight, 1.0)
    return (e.layers.cast(e.layers.mul(_rms(e, x, eps), weight), Dtype.FLOAT16),)


def _gated_rms_norm(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    x, gate = (e.tensor(value, Dtype.FLOAT32) for value in node.inputs)
    weight = e.vector(names[0], x.shape[-1], len(x.shape))
    normed = e.layers.mul(_rms(e, x, _number(node, 0)), weight)
    return (e.layers.cast(e.layers.mul(normed, e.layers.silu(gate)), Dtype.FLOAT16),)


def _l2_norm(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    x = e.tensor(node.inputs[0], Dtype.FLOAT32)
    norm = layers.rsqrt(layers.offset(layers.mean_last(layers.mul(x, x), is_sum=True), _number(node, 0)))
    return (layers.scale(layers.mul(x, norm), _number(node, 1)),)


def _swiglu(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    gate, up = (e.tensor(value, Dtype.FLOAT32) for value in node.inputs)
    return (e.layers.cast(e.layers.mul(e.layers.silu(gate), up), Dtype.FLOAT16),)


def _sigmoid_gate(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    x, gate = (e.tensor(value, Dtype.FLOAT32) for value in node.inputs)
    return (e.layers.cast(e.layers.mul(x, e.layers.sigmoid(gate)), Dtype.FLOAT16),)


def _delta_gates(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    a, b = (e.tensor(value, Dtype.FLOAT32) for value in node.inputs)
    size, rank = a.shape[-1], len(a.shape)
    rate = layers.unary(layers.unary(e.vector(names[0], size, rank), "EXP"), "NEG")
    log_g = layers.mul(rate, layers.softplus(layers.add(a, e.vector(names[1], size, rank))))
    return log_g, layers.sigmoid(b)


def _add(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    a, b = (e.tensor(value, Dtype.FLOAT32) for value in node.inputs)
    return (e.layers.add(a, b),)


# --- shape ---


def _concat(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    tensors = [e.tensor(value, node.outputs[0].dtype) for value in node.inputs]
    return (e.layers.concat(tensors, len(tensors[0].shape) - 1),)


def _split(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    sizes = _sizes(node)
    return _slices(e.layers, e.tensor(node.inputs[0]), sizes)


def _slices(layers: Layers, x: Any, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    starts = np.cumsum((0, *sizes[:-1]))
    return tuple(layers.take_last(x, int(start), size) for start, size in zip(starts, sizes, strict=True))


def _split_heads(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    x = e.tensor(node.inputs[0])
    return (e.layers.reshape(x, (x.shape[0], *node.outputs[0].row_shape)),)


def _merge_heads(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    x = e.tensor(node.inputs[0])
    return (e.layers.reshape(x, (x.shape[0], *node.outputs[0].row_shape)),)


def _rotary(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    """The angles [M, R/2] are shared by all heads of x [M, H, d]."""
    layers = e.layers
    x, cos, sin = (e.tensor(value, Dtype.FLOAT32) for value in node.inputs)
    half = cos.shape[-1]
    cos, sin = (layers.reshape(angle, (angle.shape[0], 1, half)) for angle in (cos, sin))
    x1, x2 = layers.take_last(x, 0, half), layers.take_last(x, half, half)
    parts = [layers.sub(layers.mul(x1, cos), layers.mul(x2, sin)), layers.add(layers.mul(x2, cos), layers.mul(x1, sin))]
    rest = x.shape[-1] - 2 * half
    if rest:
        parts.append(layers.take_last(x, 2 * half, rest))
    return (layers.cast(layers.concat(parts, 2), Dtype.FLOAT16),)


def _sizes(node: Node) -> tuple[int, ...]:
    sizes = node.attrs[0]
    if not isinstance(sizes, tuple):
        raise BuildError(f"{node.op}: {sizes!r} are not sizes")
    return sizes


def _number(node: Node, index: int) -> float:
    value = node.attrs[index]
    if not isinstance(value, int | float):
        raise BuildError(f"{node.op}: attribute {index} is {value!r}, not a number")
    return float(value)


ROW_LOWERINGS: dict[Op, RowLowering] = {
    Op.LINEAR: _linear,
    Op.FUSED_LINEAR: _fused_linear,
    Op.RMS_NORM: _rms_norm,
    Op.GATED_RMS_NORM: _gated_rms_norm,
    Op.L2_NORM: _l2_norm,
    Op.SWIGLU: _swiglu,
    Op.SIGMOID_GATE: _sigmoid_gate,
    Op.DELTA_GATES: _delta_gates,
    Op.ADD: _add,
    Op.CONCAT: _concat,
    Op.SPLIT: _split,
    Op.SPLIT_HEADS: _split_heads,
    Op.MERGE_HEADS: _merge_heads,
    Op.ROTARY: _rotary,
}
