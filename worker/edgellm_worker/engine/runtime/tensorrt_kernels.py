"""The kernel calls of a program: for each op that stands between segments, how to launch its CUDA kernel.

A call is prepared once (macros from the node's shapes, pointers from the program) and launched many times, usually
under graph capture. What differs per row and per step (positions, slots, committed counts) is read on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from edgellm_worker.engine.build.segments import WeightGroup
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import KERNEL_OPS, Dtype, Node, Op, Value
from edgellm_worker.engine.runtime.cuda import Cuda, Kernel
from edgellm_worker.engine.runtime.tensorrt_row_kernels import RowKernels
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore

Launch = Callable[[], None]

SPAN = 128  # cache positions per attention block where the context is split
_TILE = 64
_ENOUGH_BLOCKS = 96  # query blocks that fill a GPU without splitting the context


class Mode(Enum):
    """STEP keeps this pass's per-token results pending in the state; PREFILL folds them itself at the end."""

    STEP = auto()
    PREFILL = auto()


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a value lives; integer values may lie `stride` elements apart."""

    pointer: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Control:
    """Device arrays shared by all calls of a program: slots int32 [B] and, per slot, which pending half is current."""

    slots: int
    parity: int
    batch: int


@dataclass(frozen=True, slots=True)
class Place:
    """What a call needs of its program: the bindings of values, the mode, the control arrays, and the sums that the
    norms after them compute.
    """

    binding: Callable[[Value], Binding]
    mode: Mode
    control: Control
    fused: frozenset[Node] = frozenset()

    def pointer(self, value: Value) -> int:
        return self.binding(value).pointer


class Kernels:
    """Compiles each kernel once per set of macros. Scratch for split attention is shared: calls run one at a time."""

    def __init__(self, cuda: Cuda, weights: WeightStore) -> None:
        self._cuda = cuda
        self._weights = weights
        self._compiled: dict[tuple[str, str, tuple[tuple[str, int], ...]], Kernel] = {}
        self._frequencies: dict[tuple[float, ...], int] = {}
        self._rows = RowKernels(cuda, weights, self._row_kernel)
        self._scratch: dict[tuple[int, int], tuple[int, int]] = {}

    def kernel(self, file: str, name: str, signature: str, macros: dict[str, int], shared_bytes: int = 0) -> Kernel:
        key = (file, name, tuple(sorted(macros.items())))
        if key not in self._compiled:
            self._compiled[key] = self._cuda.compile(file, macros).kernel(name, signature, shared_bytes)
        return self._compiled[key]

    def prepare(self, node: Node, place: Place) -> Launch | None:
        """-> what launches `node`, or None where another call does its work."""
        if node.op in KERNEL_OPS:
            return _CALLS[node.op](self, node, place)
        return self._rows.prepare(node, place)

    def call(self, kernel: Kernel, grid: tuple[int, int, int], threads: int, *arguments: float) -> Launch:
        return lambda: self._cuda.run(kernel, grid, threads, arguments)

    def token_kernel(self, name: str, signature: str) -> Kernel:
        return self.kernel("tokens", name, signature, {})

    def _row_kernel(self, name: str, signature: str, shared_bytes: int) -> Kernel:
        """One module; what differs is the shared memory of a launch."""
        return self.kernel("rows", name, signature, {"SHARED": shared_bytes}, shared_bytes)

    # --- one method per op ---

    def embed(self, node: Node, place: Place) -> Launch:
        ids, out = place.binding(node.inputs[0]), node.outputs[0]
        vocab, width = node.weights[0].shape
        table = self._weights.table(node.weights[0])
        kernel = self.token_kernel("embed", "pppiii")
        return self.call(
            kernel, (out.num_rows, 1, 1), 256, table, ids.pointer, place.pointer(out), width, vocab, ids.stride
        )

    def gather_rows(self, node: Node, place: Place) -> Launch:
        x, index = node.inputs
        out = node.outputs[0]
        width = int(np.prod(out.row_shape)) * out.dtype.num_bytes // 2
        pointers = (place.pointer(x), place.pointer(index), place.pointer(out))
        kernel = self.token_kernel("gather_rows", "pppiii")
        return self.call(kernel, (out.num_rows, 1, 1), 256, *pointers, x.shape[1], out.shape[1], width)

    def token_positions(self, node: Node, place: Place) -> Launch:
        start, out = node.inputs[0], node.outputs[0]
        kernel = self.token_kernel("token_positions", "ppi")
        return self.call(
            kernel, (out.shape[0], 1, 1), out.shape[1], place.pointer(start), place.pointer(out), out.shape[1]
        )

    def rope_angles(self, node: Node, place: Place) -> Launch:
        frequencies, magnitude = node.attrs
        if not isinstance(frequencies, tuple) or not isinstance(magnitude, float):
            raise BuildError("rope_angles: frequencies and magnitude expected")
        if frequencies not in self._frequencies:
            self._frequencies[frequencies] = self._cuda.upload(np.array(frequencies, np.float32))
        table, half = self._frequencies[frequencies], len(frequencies)
        pointers = (
            place.pointer(node.inputs[0]),
            table,
            place.pointer(node.outputs[0]),
            place.pointer(node.outputs[1]),
        )
        threads = -(-half // 32) * 32
        kernel = self.token_kernel("rope_angles", "ppppif")
        return self.call(kernel, (node.inputs[0].num_rows, 1, 1), threads, *pointers, half, magnitude)

    def attend(self, node: Node, place: Place) -> Launch:
        q, k, v, cache_k, cache_v, start = node.inputs
        scale, k_scale, v_scale = (float(str(value)) for value in node.attrs)
        batch, tokens, num_heads, dim = q.shape
        _, num_kv_heads, capacity, _ = cache_k.shape
        rows = tokens * (num_heads // num_kv_heads)
        q_rows = 16 if rows <= 16 else 32
        q_blocks = -(-rows // q_rows)
        span = SPAN if q_blocks * num_kv_heads * batch < _ENOUGH_BLOCKS else -(-capacity // _TILE) * _TILE
        splits = -(-capacity // span)
        macros = {"HQ": num_heads, "HKV": num_kv_heads, "D": dim, "L": capacity, "QROWS": q_rows, "SPAN": span}
        macros["KV_FP8"] = int(cache_k.dtype is Dtype.FP8)
        shared = (q_rows + _TILE) * (dim + 8) * 2 + q_rows * ((_TILE + 4) * 4 + (_TILE + 8) * 2 + 12) + 16
        kernel = self.kernel("attend", "attend", "pppppppppp" + "ifff", macros, shared)
        cells = batch * num_kv_heads * q_blocks
        partial, arrived = self._attention_scratch(cells, 4 * splits * q_rows * (dim + 2) if splits > 1 else 4)
        pointers = [place.pointer(value) for value in (q, k, v, cache_k, cache_v, start)]
        pointers += [place.control.slots, place.pointer(node.outputs[0]), partial, arrived]
        grid = (q_blocks * splits, num_kv_heads, batch)
        return self.call(kernel, grid, 128, *pointers, tokens, scale, k_scale, v_scale)

    def _attention_scratch(self, cells: int, bytes_per_cell: int) -> tuple[int, int]:
        need = cells * max(bytes_per_cell, 4)
        for (num_bytes, num_cells), scratch in self._scratch.items():
            if num_bytes >= need and num_cells >= cells:
                return scratch
        self._scratch[need, cells] = (self._cuda.allocate(need), self._cuda.allocate(4 * cells, zero=True))
        return self._scratch[need, cells]

    def conv_commit(self, node: Node, place: Place) -> Launch | None:
        """Folding the *last* pass is causal_conv's work; only a prefill chunk's own end is a call."""
        tail, pending, commit = node.inputs
        if pending.producer is None:
            return None
        channels = pending.shape[-1]
        kernel = self.kernel("conv", "conv_commit", "ppppi", {"C": channels})
        pointers = (place.pointer(pending), place.pointer(tail), place.pointer(commit), place.control.slots)
        return self.call(kernel, (-(-channels // 128), place.control.batch, 1), 128, *pointers, pending.shape[1])

    def causal_conv(self, node: Node, place: Place) -> Launch:
        x, tail = node.inputs
        if tail.producer is None or tail.producer.op is not Op.CONV_COMMIT:
            raise BuildError("causal_conv: its tail must come from conv_commit")
        _, pending, commit = tail.producer.inputs
        batch, tokens, channels = x.shape
        if node.weights[0].shape[-1] != 4:
            raise BuildError(f"the convolution kernel has 4 taps, this model {node.weights[0].shape[-1]}")
        weight = self._weights.vector(WeightGroup((node.weights[0],), is_matrix=False))
        kernel = self.kernel("conv", "causal_conv", "pppppppiii", {"C": channels})
        pointers = [place.pointer(x), place.pointer(tail), place.pointer(pending), weight, place.pointer(commit)]
        pointers += [place.control.slots, place.pointer(node.outputs[0])]
        keep = int(place.mode is Mode.STEP)
        grid = (-(-channels // 128), batch, 1)
        return self.call(kernel, grid, 128, *pointers, tokens, pending.shape[1], keep)

    def gated_delta_rule(self, node: Node, place: Place) -> Launch:
        q, k, v, log_g, beta, state, pending_k, pending_u, pending_log_g, commit = node.inputs
        batch, tokens = q.shape[:2]
        out, _, u = node.outputs
        kernel = self.kernel("delta", "gated_delta_rule", "p" * 14 + "iii", _delta_macros(k, state))
        pointers = [
            place.pointer(value) for value in (q, k, v, log_g, beta, state, pending_k, pending_u, pending_log_g)
        ]
        pointers += [place.pointer(commit), place.control.slots, place.control.parity, place.pointer(out)]
        keep = place.mode is Mode.STEP
        pointers.append(0 if keep else place.pointer(u))
        grid = (state.shape[3] // 32, state.shape[1], batch)
        return self.call(kernel, grid, 256, *pointers, tokens, pending_u.shape[1], int(keep))

    def delta_fold(self, node: Node, place: Place) -> Launch:
        state, k, u, log_g, commit = node.inputs
        kernel = self.kernel("delta", "delta_fold", "ppppppi", _delta_macros(k, state))
        pointers = [place.pointer(value) for value in (state, k, u, log_g, commit)]
        grid = (state.shape[3] // 32, state.shape[1], k.shape[0])
        return self.call(kernel, grid, 256, *pointers, place.control.slots, k.shape[1])

    def arg_max(self, node: Node, place: Place) -> Launch:
        x, out = node.inputs[0], place.binding(node.outputs[0])
        kernel = self.token_kernel("arg_max", "ppii")
        return self.call(kernel, (_rows(x), 1, 1), 1024, place.pointer(x), out.pointer, x.shape[-1], out.stride)

    def top_k(self, node: Node, place: Place) -> Launch:
        x, (values, ids) = node.inputs[0], node.outputs
        k = values.shape[-1]
        if k > 256:
            raise BuildError(f"top_k: at most 256 candidates, not {k}")
        pointers = (place.pointer(x), place.pointer(values), place.pointer(ids))
        return self.call(self.token_kernel("top_k", "pppii"), (_rows(x), 1, 1), 512, *pointers, x.shape[-1], k)

    def log_sum_exp(self, node: Node, place: Place) -> Launch:
        x = node.inputs[0]
        pointers = (place.pointer(x), place.pointer(node.outputs[0]))
        return self.call(self.token_kernel("log_sum_exp", "ppi"), (_rows(x), 1, 1), 1024, *pointers, x.shape[-1])


def _rows(x: Value) -> int:
    return int(np.prod(x.shape[:-1]))


def _delta_macros(k: Value, state: Value) -> dict[str, int]:
    _, num_value_heads, key_dim, value_dim = state.shape
    if value_dim % 32 or key_dim % 8:
        raise BuildError(f"the delta rule kernel needs head sizes in 8s and 32s, not {key_dim} and {value_dim}")
    return {"HK": k.shape[-2], "HV": num_value_heads, "DK": key_dim, "DV": value_dim}


_CALLS: dict[Op, Callable[[Kernels, Node, Place], Launch | None]] = {
    Op.EMBED: Kernels.embed,
    Op.GATHER_ROWS: Kernels.gather_rows,
    Op.TOKEN_POSITIONS: Kernels.token_positions,
    Op.ROPE_ANGLES: Kernels.rope_angles,
    Op.ATTEND: Kernels.attend,
    Op.CONV_COMMIT: Kernels.conv_commit,
    Op.CAUSAL_CONV: Kernels.causal_conv,
    Op.GATED_DELTA_RULE: Kernels.gated_delta_rule,
    Op.DELTA_FOLD: Kernels.delta_fold,
    Op.ARG_MAX: Kernels.arg_max,
    Op.TOP_K: Kernels.top_k,
    Op.LOG_SUM_EXP: Kernels.log_sum_exp,
}
