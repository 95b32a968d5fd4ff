"""Row operations as kernel calls, for engines whose networks hold matrix products alone (`Lowering.PRODUCTS`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.build.segments import WeightGroup
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Dtype, Node, Op, Value
from edgellm_worker.engine.runtime.cuda import Cuda, Kernel
from edgellm_worker.engine.runtime.tensorrt_place import Place
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore

Launch = Callable[[], None]
_THREADS = 256


@dataclass(frozen=True, slots=True)
class RowKernels:
    """`kernel(name, signature, shared bytes)` compiles from kernels/rows.cu."""

    cuda: Cuda
    weights: WeightStore
    kernel: Callable[[str, str, int], Kernel]

    def prepare(self, node: Node, place: Place) -> Launch | None:
        """-> what launches `node`; None for views and for sums that the norm after them takes in."""
        return _CALLS[node.op](self, node, place)

    def _run(self, name: str, signature: str, blocks: int, threads: int, arguments: Sequence[float]) -> Launch:
        kernel = self.kernel(name, signature, 0)
        return lambda: self.cuda.run(kernel, (blocks, 1, 1), threads, arguments)

    def _vector(self, node: Node, index: int) -> int:
        return self.weights.vector(WeightGroup((node.weights[index],), is_matrix=False))

    def rms_norm(self, node: Node, place: Place) -> Launch | None:
        if node in place.fused:
            return None
        x, out = node.inputs[0], node.outputs[0]
        offset = float(bool(node.attrs[1]))
        other, total, source = 0, 0, x
        if x.producer is not None and x.producer in place.fused:
            source, added = x.producer.inputs
            other, total = place.pointer(added), place.pointer(x)
        width = x.shape[-1]
        heads = place.heads(source)
        pointers = (heads.pointer, other, total, self._vector(node, 0), place.pointer(out))
        kernel = self.kernel("rms_norm", "pppppiffiiii", 4 * width)
        sizes = (int(source.dtype is Dtype.FLOAT16), _heads(x), heads.pitch, heads.step)
        arguments = (*pointers, width, _number(node, 0), offset, *sizes)
        threads = _threads(-(-width // 4))
        return lambda: self.cuda.run(kernel, (_vectors(x), 1, 1), threads, arguments)

    def gated_rms_norm(self, node: Node, place: Place) -> Launch:
        x, gate = node.inputs
        gates = place.heads(gate)
        pointers = (place.pointer(x), gates.pointer, self._vector(node, 0), place.pointer(node.outputs[0]))
        width = x.shape[-1]
        arguments = (*pointers, width, _number(node, 0), _heads(x), gates.pitch, gates.step)
        return self._run("gated_rms_norm", "ppppifiii", _vectors(x), _threads(width), arguments)

    def l2_norm(self, node: Node, place: Place) -> Launch:
        x, width = node.inputs[0], node.inputs[0].shape[-1]
        heads = place.heads(x)
        pointers = (heads.pointer, place.pointer(node.outputs[0]))
        arguments = (*pointers, width, _number(node, 0), _number(node, 1), _heads(x), heads.pitch, heads.step)
        return self._run("l2_norm", "ppiffiii", _vectors(x), _threads(width), arguments)

    def swiglu(self, node: Node, place: Place) -> Launch:
        """Four elements a thread where they lie so."""
        (gate, gate_pitch), (up, up_pitch) = (place.rows(value) for value in node.inputs)
        out = node.outputs[0]
        width = int(np.prod(out.row_shape))
        by_four = not (width | gate_pitch | up_pitch) % 4 and not (gate | up) % 8
        arguments = (gate, up, place.pointer(out), width, gate_pitch, up_pitch, int(by_four))
        grid = (-(-width // (_THREADS * (4 if by_four else 1))), out.num_rows, 1)
        kernel = self.kernel("swiglu", "pppiiii", 0)
        return lambda: self.cuda.run(kernel, grid, _THREADS, arguments)

    def sigmoid_gate(self, node: Node, place: Place) -> Launch:
        x, out = node.inputs[0], node.outputs[0]
        gates = place.heads(node.inputs[1])
        width = int(np.prod(out.row_shape))
        arguments = (place.pointer(x), gates.pointer, place.pointer(out), width, gates.pitch, gates.step, gates.width)
        grid = (-(-width // _THREADS), out.num_rows, 1)
        kernel = self.kernel("sigmoid_gate", "pppiiii", 0)
        return lambda: self.cuda.run(kernel, grid, _THREADS, arguments)

    def add(self, node: Node, place: Place) -> Launch | None:
        if node in place.fused:
            return None
        size = _size(node.outputs[0])
        pointers = [place.pointer(value) for value in (*node.inputs, node.outputs[0])]
        halves = [int(value.dtype is Dtype.FLOAT16) for value in node.inputs]
        return self._run("add", "pppiii", -(-size // _THREADS), _THREADS, (*pointers, size, *halves))

    def rotary(self, node: Node, place: Place) -> Launch | None:
        if node in place.fused:
            return None
        x, cos, sin = node.inputs
        heads = place.heads(x)
        pointers = [heads.pointer, place.pointer(cos), place.pointer(sin), place.pointer(node.outputs[0])]
        arguments = (*pointers, x.shape[-1], cos.shape[-1], x.shape[-2], heads.pitch, heads.step)
        return self._run("rotary", "ppppiiiii", _vectors(x), _threads(x.shape[-1]), arguments)

    def delta_gates(self, node: Node, place: Place) -> Launch:
        size, heads = _size(node.inputs[0]), node.inputs[0].shape[-1]
        (a, a_pitch), (b, b_pitch) = (place.rows(value) for value in node.inputs)
        pointers = [a, b, self._vector(node, 0), self._vector(node, 1), *(place.pointer(out) for out in node.outputs)]
        arguments = (*pointers, size, heads, a_pitch, b_pitch)
        return self._run("delta_gates", "ppppppiiii", -(-size // _THREADS), _THREADS, arguments)

    def split(self, node: Node, place: Place) -> Launch | None:
        if place.is_view(node.outputs[0]):
            return None
        x = node.inputs[0]
        starts = np.cumsum([0, *(out.shape[-1] for out in node.outputs[:-1])])
        parts = [
            self._copy(place, (x, int(start)), (out, 0), out.shape[-1])
            for start, out in zip(starts, node.outputs, strict=True)
        ]
        return _all(parts)

    def concat(self, node: Node, place: Place) -> Launch:
        out = node.outputs[0]
        starts = np.cumsum([0, *(x.shape[-1] for x in node.inputs[:-1])])
        parts = [
            self._copy(place, (x, 0), (out, int(start)), x.shape[-1])
            for start, x in zip(starts, node.inputs, strict=True)
        ]
        return _all(parts)

    def view(self, _node: Node, _place: Place) -> None:
        """Heads side by side lie as heads apart do."""

    def _copy(self, place: Place, source: tuple[Value, int], target: tuple[Value, int], width: int) -> Launch:
        (x, begin), (out, to) = source, target
        if x.dtype is not out.dtype:
            raise BuildError(f"parts of different types: {x.dtype} and {out.dtype}")
        unit = x.dtype.num_bytes // 2
        sizes = (x.shape[-1] * unit, out.shape[-1] * unit, begin * unit, to * unit, width * unit)
        return self._run("copy_part", "ppiiiii", _vectors(x), _THREADS, (place.pointer(x), place.pointer(out), *sizes))


def _all(launches: Sequence[Launch]) -> Launch:
    def launch() -> None:
        for part in launches:
            part()

    return launch


def _vectors(x: Value) -> int:
    return _size(x) // x.shape[-1]


def _heads(x: Value) -> int:
    """Vectors of one token."""
    return int(np.prod(x.row_shape[:-1]))


def _size(x: Value) -> int:
    return int(np.prod(x.shape))


def _threads(width: int) -> int:
    return max(32, min(1024, -(-width // 32) * 32))


def _number(node: Node, index: int) -> float:
    value = node.attrs[index]
    if not isinstance(value, int | float):
        raise BuildError(f"{node.op}: attribute {index} is {value!r}, not a number")
    return float(value)


_CALLS: dict[Op, Callable[[RowKernels, Node, Place], Launch | None]] = {
    Op.RMS_NORM: RowKernels.rms_norm,
    Op.GATED_RMS_NORM: RowKernels.gated_rms_norm,
    Op.L2_NORM: RowKernels.l2_norm,
    Op.SWIGLU: RowKernels.swiglu,
    Op.SIGMOID_GATE: RowKernels.sigmoid_gate,
    Op.ADD: RowKernels.add,
    Op.ROTARY: RowKernels.rotary,
    Op.DELTA_GATES: RowKernels.delta_gates,
    Op.SPLIT: RowKernels.split,
    Op.CONCAT: RowKernels.concat,
    Op.SPLIT_HEADS: RowKernels.view,
    Op.MERGE_HEADS: RowKernels.view,
}
