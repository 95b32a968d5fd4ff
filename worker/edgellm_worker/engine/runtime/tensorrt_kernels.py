"""The kernel calls of a program: for each op that stands between segments, how to launch its CUDA kernel.

A call is prepared once (macros from the node's shapes, pointers from the program) and launched many times, usually
under graph capture. What differs per row and per step (positions, slots, committed counts) is read on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.build.segments import WeightGroup
from edgellm_worker.engine.checkpoint.weights import Nvfp4Weight
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import KERNEL_OPS, Dtype, Node, Op, Value
from edgellm_worker.engine.runtime.attention_split import STEP_ROWS, TILE, AttentionSplit
from edgellm_worker.engine.runtime.cuda import Cuda, Kernel
from edgellm_worker.engine.runtime.packed_linear import Operands, PackedLinear
from edgellm_worker.engine.runtime.scratch import Scratch
from edgellm_worker.engine.runtime.tensorrt_layout import HeadChain, is_step
from edgellm_worker.engine.runtime.tensorrt_place import Binding, Control, Mode, Place
from edgellm_worker.engine.runtime.tensorrt_products import Products
from edgellm_worker.engine.runtime.tensorrt_row_kernels import RowKernels
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore

__all__ = ["Binding", "Control", "Kernels", "Launch", "Mode", "Place"]

Launch = Callable[[], None]

_PIECES = (16, 32, 64)  # scores a thread of the candidates' kernel holds
_CANDIDATES_PER_BLOCK = 4096


class Kernels:
    """Compiles each kernel once per set of macros."""

    def __init__(self, cuda: Cuda, weights: WeightStore) -> None:
        self._cuda = cuda
        self._weights = weights
        self._compiled: dict[tuple[str, str, tuple[tuple[str, int], ...]], Kernel] = {}
        self._frequencies: dict[tuple[float, ...], int] = {}
        self._rows = RowKernels(cuda, weights, self._row_kernel)
        self.products = Products(cuda, weights, self.kernel)
        self._packed = PackedLinear(cuda)
        self._partial, self._arrived = Scratch(cuda), Scratch(cuda)

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

    def packed_linear(self, node: Node, place: Place) -> Launch:
        (x,), (out,) = node.inputs, node.outputs
        weight, *biases = node.weights
        packed = self._weights.packed(weight)
        bias = self._weights.vector(WeightGroup((biases[0],), is_matrix=False)) if biases else 0
        n, k = weight.shape
        pointers = (place.pointer(x), packed.data, packed.scales, bias, place.pointer(out))
        operands = Operands(*pointers, out.num_rows, n, k, packed.factor)
        return self._packed.prepare(operands, is_fp4=isinstance(weight, Nvfp4Weight))

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
        """Steps have a kernel of their own; this one takes prompt pieces."""
        if is_step(node):
            return self._attend_step(node, place)
        q, k, v, cache_k, cache_v, start = node.inputs
        scale, k_scale, v_scale = (float(str(value)) for value in node.attrs)
        batch, tokens, num_heads, dim = q.shape
        _, num_kv_heads, capacity, _ = cache_k.shape
        split = AttentionSplit.of_prompt(q.shape, num_kv_heads, capacity)
        q_rows = split.q_rows
        macros = {"HQ": num_heads, "HKV": num_kv_heads, "D": dim, "L": capacity, "QROWS": q_rows, "SPAN": split.span}
        macros["KV_FP8"] = int(cache_k.dtype is Dtype.FP8)
        shared = (q_rows + TILE) * (dim + 8) * 2 + q_rows * ((TILE + 4) * 4 + (TILE + 8) * 2 + 12) + 16
        kernel = self.kernel("attend", "attend", "p" * 10 + "iiiifff", macros, shared)
        partial, arrived = self._split_scratch(split)
        values = place.heads(v)
        pointers = [place.pointer(q), place.pointer(k), values.pointer]
        pointers += [place.pointer(value) for value in (cache_k, cache_v, start)]
        pointers += [place.control.slots, place.pointer(node.outputs[0]), partial, arrived]
        grid = (split.q_blocks * split.splits, num_kv_heads, batch)
        sizes = (tokens, num_kv_heads * dim, values.pitch, values.step)
        return self.call(kernel, grid, 128, *pointers, *sizes, scale, k_scale, v_scale)

    def _attend_step(self, node: Node, place: Place) -> Launch:
        q, _, v, cache_k, cache_v, start = node.inputs
        scale, k_scale, v_scale = (float(str(value)) for value in node.attrs)
        batch, tokens, num_heads, dim = q.shape
        _, num_kv_heads, capacity, _ = cache_k.shape
        query, key = (HeadChain.of(value, place.fused) for value in node.inputs[:2])
        split = AttentionSplit.of_step(q.shape, num_kv_heads, capacity)
        macros = {"HQ": num_heads, "HKV": num_kv_heads, "D": dim, "L": capacity, "SPLITS": split.splits}
        macros |= {"KV_FP8": int(cache_k.dtype is Dtype.FP8), "NORM": int(query.norm is not None)}
        macros["ROT"] = query.rotary.inputs[1].shape[-1] if query.rotary is not None else 0
        warps = 8 if _step_bytes(dim, 8) <= self._cuda.block_shared_bytes else 4
        macros["WARPS"] = warps
        shared = _step_bytes(dim, warps)
        kernel = self.kernel("attend_step", "attend_step", "p" * 14 + "i" * 7 + "fffff", macros, shared)
        partial, arrived = self._split_scratch(split)
        heads = [place.heads(value) for value in (query.source, key.source, v)]
        angles = query.rotary.inputs[1:] if query.rotary is not None else ()
        pointers = [one.pointer for one in heads]
        pointers += [place.pointer(value) for value in (cache_k, cache_v, start)]
        pointers += [place.control.slots, place.pointer(node.outputs[0]), partial, arrived]
        pointers += [place.pointer(value) for value in angles] or [0, 0]
        pointers += [self._norm_weight(chain) for chain in (query, key)]
        strides = [number for one in heads for number in (one.pitch, one.step)]
        eps, is_zero_centred = query.norm.attrs[:2] if query.norm is not None else (0.0, False)
        grid = (split.q_blocks * split.splits, num_kv_heads, batch)
        scales = (scale, k_scale, v_scale, float(str(eps)), float(bool(is_zero_centred)))
        return self.call(kernel, grid, 32 * warps, *pointers, tokens, *strides, *scales)

    def _norm_weight(self, chain: HeadChain) -> int:
        if chain.norm is None:
            return 0
        return self._weights.vector(WeightGroup((chain.norm.weights[0],), is_matrix=False))

    def _split_scratch(self, split: AttentionSplit) -> tuple[int, int]:
        return self._partial.place(split.num_bytes), self._arrived.place(4 * split.cells)

    def conv_commit(self, node: Node, place: Place) -> Launch | None:
        """Folding the *last* pass is causal_conv's work; only a prefill chunk's own end is a call."""
        tail, pending, commit = node.inputs
        if pending.producer is None:
            return None
        channels = pending.shape[-1]
        kernel = self.kernel("conv", "conv_commit", "ppppii", {"C": channels})
        source, pitch = place.rows(pending)
        pointers = (source, place.pointer(tail), place.pointer(commit), place.control.slots)
        grid = (-(-channels // 128), place.control.batch, 1)
        return self.call(kernel, grid, 128, *pointers, pending.shape[1], pitch)

    def causal_conv(self, node: Node, place: Place) -> Launch:
        x, tail = node.inputs
        if tail.producer is None or tail.producer.op is not Op.CONV_COMMIT:
            raise BuildError("causal_conv: its tail must come from conv_commit")
        _, pending, commit = tail.producer.inputs
        batch, tokens, channels = x.shape
        if node.weights[0].shape[-1] != 4:
            raise BuildError(f"the convolution kernel has 4 taps, this model {node.weights[0].shape[-1]}")
        weight = self._weights.vector(WeightGroup((node.weights[0],), is_matrix=False))
        kernel = self.kernel("conv", "causal_conv", "p" * 7 + "iiii", {"C": channels})
        source, pitch = place.rows(x)
        pointers = [source, place.pointer(tail), place.pointer(pending), weight, place.pointer(commit)]
        pointers += [place.control.slots, place.pointer(node.outputs[0])]
        keep = int(place.mode is Mode.STEP)
        grid = (-(-channels // 128), batch, 1)
        return self.call(kernel, grid, 128, *pointers, tokens, pending.shape[1], keep, pitch)

    def gated_delta_rule(self, node: Node, place: Place) -> Launch:
        q, k, v, log_g, beta, state, pending_k, pending_u, pending_log_g, commit = node.inputs
        batch, tokens = q.shape[:2]
        out, _, u = node.outputs
        kernel = self.kernel("delta", "gated_delta_rule", "p" * 14 + "iiii", _delta_macros(k, state))
        values = place.heads(v)
        pointers = [place.pointer(q), place.pointer(k), values.pointer]
        pointers += [place.pointer(value) for value in (log_g, beta, state, pending_k, pending_u, pending_log_g)]
        pointers += [place.pointer(commit), place.control.slots, place.control.parity, place.pointer(out)]
        keep = place.mode is Mode.STEP
        pointers.append(0 if keep else place.pointer(u))
        grid = (state.shape[3] // 32, state.shape[1], batch)
        return self.call(kernel, grid, 256, *pointers, tokens, pending_u.shape[1], int(keep), values.pitch)

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
        """With the log-sum-exp of the same scores, where the caller wants that too."""
        x, (values, ids) = node.inputs[0], node.outputs
        sums = [one for one in place.fused if one.op is Op.LOG_SUM_EXP and one.inputs[0] is x]
        log_sum_exp = place.pointer(sums[0].outputs[0]) if sums else 0
        pieces = self._pieces(x, values.shape[-1])
        merge = self.kernel("candidates", "merge", "ppppp", pieces.macros)
        pointers = (pieces.found, pieces.sums, place.pointer(values), place.pointer(ids), log_sum_exp)
        return self._after_pieces(pieces, place.pointer(x), self.call(merge, (_rows(x), 1, 1), 256, *pointers))

    def log_sum_exp(self, node: Node, place: Place) -> Launch | None:
        if node in place.fused:
            return None
        x = node.inputs[0]
        pieces = self._pieces(x, 1)
        merge = self.kernel("candidates", "merge_sums", "pp", pieces.macros)
        call = self.call(merge, (_rows(x), 1, 1), 32, pieces.sums, place.pointer(node.outputs[0]))
        return self._after_pieces(pieces, place.pointer(x), call)

    def _pieces(self, x: Value, count: int) -> _Pieces:
        """How a row of scores is cut, and the scratch that its pieces leave their candidates and sums in."""
        vocab, rows = x.shape[-1], _rows(x)
        for per_thread in _PIECES:
            parts = -(-vocab // (256 * per_thread))
            if count <= 256 and parts * count <= _CANDIDATES_PER_BLOCK:
                found = self._partial.place(rows * 8 * parts * (count + 1))
                macros = {"K": count, "PER": per_thread, "PARTS": parts}
                return _Pieces(macros, rows, vocab, found, found + 8 * rows * parts * count)
        raise BuildError(f"top_k: {count} candidates of {vocab} scores are too many")

    def _after_pieces(self, pieces: _Pieces, scores: int, then: Launch) -> Launch:
        kernel = self.kernel("candidates", "parts", "pppi", pieces.macros)
        grid = (pieces.macros["PARTS"], pieces.num_rows, 1)
        first = self.call(kernel, grid, 256, scores, pieces.found, pieces.sums, pieces.vocab)

        def launch() -> None:
            first()
            then()

        return launch


@dataclass(frozen=True, slots=True)
class _Pieces:
    macros: dict[str, int]
    num_rows: int
    vocab: int
    found: int
    sums: int


def _step_bytes(head_dim: int, warps: int) -> int:
    """Shared memory of a block of attend_step: queries, new keys and values, and what each warp leaves to be merged."""
    return 2 * 3 * STEP_ROWS * (head_dim + 8) + 4 * warps * STEP_ROWS * (head_dim + 4 + 2) + 16


def _rows(x: Value) -> int:
    return int(np.prod(x.shape[:-1]))


def _delta_macros(k: Value, state: Value) -> dict[str, int]:
    _, num_value_heads, key_dim, value_dim = state.shape
    if value_dim % 32 or key_dim % 8:
        raise BuildError(f"the delta rule kernel needs head sizes in 8s and 32s, not {key_dim} and {value_dim}")
    return {"HK": k.shape[-2], "HV": num_value_heads, "DK": key_dim, "DV": value_dim}


_CALLS: dict[Op, Callable[[Kernels, Node, Place], Launch | None]] = {
    Op.EMBED: Kernels.embed,
    Op.PACKED_LINEAR: Kernels.packed_linear,
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
