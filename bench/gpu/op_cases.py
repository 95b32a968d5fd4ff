"""Cases of op parity that look at rows alone: inputs, the op on both sides, and the error between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu.harness import Device, relative_error
from edgellm_worker.engine.build.weight_policy import WeightPolicy, WeightReader
from edgellm_worker.engine.checkpoint.weights import Array, DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.ops.graph import Dtype, Value
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.ops.tensorrt import Reader, TensorRtOps

F32, F16, I32 = Dtype.FLOAT32, Dtype.FLOAT16, Dtype.INT32
HALF_BOUND, FLOAT_BOUND = 2e-3, 2e-5


@dataclass(frozen=True)
class Result:
    op: str
    dtype: str
    shape: str
    error: float
    bound: float


class RowCases:
    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.reference = NumpyOps()

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def half(self, *shape: int, scale: float = 1.0) -> Array:
        return self.normal(*shape, scale=scale).astype(np.float16)

    def weight(self, *shape: int) -> DenseWeight:
        return DenseWeight(self.half(*shape, scale=shape[-1] ** -0.5))

    def sizes(self) -> tuple[int, int, int]:
        return int(self.rng.integers(1, 5)), int(self.rng.integers(1, 7)), int(self.rng.choice([64, 128, 256]))

    def row_op(
        self,
        op: str,
        inputs: dict[str, Array],
        call: Callable[..., tuple[object, ...]],
        bound: float = HALF_BOUND,
        read: Reader | None = None,
    ) -> Iterator[Result]:
        ops = TensorRtOps(read)
        dtypes = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.int32): I32}
        values = [ops.input(name, array.shape, dtypes[array.dtype]) for name, array in inputs.items()]
        outputs = call(ops, *values)
        named = {f"out{i}": value for i, value in enumerate(outputs) if isinstance(value, Value)}
        found = self.device.run(ops.graph(named), inputs)
        floats = [array.astype(np.float32) if array.dtype == np.float16 else array for array in inputs.values()]
        expected = call(self.reference, *floats)
        for index, want in enumerate(expected):
            out = found[f"out{index}"]
            yield Result(op, str(out.dtype), str(out.shape), relative_error(out, np.asarray(want)), bound)

    # --- row operations ---

    def rows(self) -> Iterator[Result]:
        b, n, d = self.sizes()
        x, y = self.half(b, n, d), self.half(b, n, d, scale=3)
        w, w2, gain, bias = self.weight(96, d), self.weight(160, d), self.weight(d), self.weight(96)
        heads, gate = self.normal(b, n, 8, 32), self.half(b, n, 8, 32)
        small = self.weight(32)
        angle = self.normal(b, n, 8)
        yield from self.row_op("linear", {"x": x}, lambda o, x: (o.linear(x, w),))
        yield from self.row_op(
            "fused_linear, parts read where they are",
            {"x": x},
            lambda o, x: (o.swiglu(*o.fused_linear(x, [w, w], [None, None])),),
        )
        shapes = ((1, 100, 64), (6, 3072, 2048), (24, 2048, 8192), (24, 1000, 256), (9, 96, 4096), (17, 5120, 5120))
        for m, width, depth in shapes:
            plain = self.weight(width, depth)
            few = {"x": self.half(1, m, depth)}
            yield from self.row_op(f"linear {m}x{depth}x{width}", few, lambda o, x, w=plain: (o.linear(x, w),))
        if self.device.library is not None:
            yield from self.row_op("linear+bias", {"x": x}, lambda o, x: (o.linear(x, w, bias),))
            yield from self.row_op("fused_linear", {"x": x}, lambda o, x: o.fused_linear(x, [w, w2], [None, None]))
        for centred in (False, True):
            yield from self.row_op(
                "rms_norm",
                {"x": self.normal(b, n, d)},
                lambda o, x, c=centred: (o.rms_norm(x, gain, 1e-6, zero_centred=c),),
            )
        yield from self.row_op(
            "gated_rms_norm", {"x": heads, "g": gate}, lambda o, x, g: (o.gated_rms_norm(x, g, small, 1e-6),)
        )
        yield from self.row_op("l2_norm", {"x": heads}, lambda o, x: (o.l2_norm(x, 1e-6, 0.25),), FLOAT_BOUND)
        yield from self.row_op("swiglu", {"g": y, "u": x}, lambda o, g, u: (o.swiglu(g, u),))
        yield from self.row_op("sigmoid_gate", {"x": x, "g": y}, lambda o, x, g: (o.sigmoid_gate(x, g),))
        sums = {"x": self.normal(b, n, d), "y": self.normal(b, n, d)}
        yield from self.row_op("add", sums, lambda o, x, y: (o.add(x, y),), FLOAT_BOUND)
        yield from self.row_op("concat", {"x": x, "y": y}, lambda o, x, y: (o.concat((x, y)),))
        yield from self.row_op("split", {"x": x}, lambda o, x: o.split(x, (16, d - 16)))
        yield from self.row_op(
            "split_heads", {"x": x}, lambda o, x: (o.swiglu(o.split_heads(x, 4), o.split_heads(x, 4)),)
        )
        yield from self.row_op("merge_heads", {"x": gate}, lambda o, x: (o.swiglu(o.merge_heads(x), o.merge_heads(x)),))
        cos_sin = {"x": self.half(b, n, 4, 64), "c": np.cos(angle), "s": np.sin(angle)}
        yield from self.row_op("rotary", cos_sin, lambda o, x, c, s: (o.rotary(x, c, s),))
        ab = {"a": self.half(b, n, 8, scale=4), "b": self.half(b, n, 8)}
        a_log, dt = DenseWeight(self.normal(8)), DenseWeight(self.normal(8))
        yield from self.row_op("delta_gates", ab, lambda o, a, b: o.delta_gates(a, b, a_log, dt), FLOAT_BOUND)

    def packed(self) -> Iterator[Result]:
        """Rows of several steps and of a prompt piece; sizes that fill no tile."""
        read = WeightReader(WeightPolicy(runs_fp8=False, runs_fp4=False, packs=True))
        for n, k in ((200, 384), (1024, 208)):
            bias = DenseWeight(self.normal(n))
            for weight in (self.nvfp4(n, k), self.fp8(n, k)):
                kind = "nvfp4" if isinstance(weight, Nvfp4Weight) else "fp8"
                for batch, tokens in ((1, 1), (4, 6), (8, 6), (1, 100)):
                    for given, word in ((None, ""), (bias, "+bias")):
                        call = partial(_linear, weight=weight, bias=given)
                        x = {"x": self.half(batch, tokens, k)}
                        yield from self.row_op(f"packed_linear{word} {kind}", x, call, HALF_BOUND, read)

    def nvfp4(self, n: int, k: int) -> Nvfp4Weight:
        scales = (self.rng.random((n, k // 16)) * 4 + 0.5).astype(ml_dtypes.float8_e4m3fn)
        return Nvfp4Weight(self.rng.integers(0, 256, (n, k // 2), np.uint8), scales, np.float32(0.01))

    def fp8(self, n: int, k: int) -> Fp8Weight:
        return Fp8Weight(self.normal(n, k).astype(ml_dtypes.float8_e4m3fn), np.float32(0.05))

    def quantized(self) -> Iterator[Result]:
        x = self.half(2, 3, 128)
        if self.device.library is None:
            return
        if self.device.library.has_fp8:
            fp8 = self.fp8(64, 128)
            yield from self.row_op("linear fp8", {"x": x}, lambda o, x: (o.linear(x, fp8),), 5e-3)
        if self.device.library.has_fp4 and self.device.cuda.architecture >= "sm100":
            fp4 = self.nvfp4(64, 128)
            yield from self.row_op("linear nvfp4", {"x": x}, lambda o, x: (o.linear(x, fp4),), 5e-3)

    def parts(self) -> Iterator[Result]:
        """Kernels that read heads and parts where a joint product left them."""
        b, n, _ = self.sizes()
        gain, a_log, dt = self.weight(32), DenseWeight(self.normal(8)), DenseWeight(self.normal(8))
        x, mixed = self.half(b, n, 16 + 8 * 64 + 8 + 8 + 96), self.normal(b, n, 8 * 32 + 96)
        heads = self.normal(b, n, 8, 32)
        angle = self.normal(b, n, 8)
        cuts = (16, 8 * 64, 8, 8, 96)

        def gated(o: NumpyOps, x: Array) -> Array:
            y, gate = o.split(o.split_heads(o.split(x, cuts)[1], 8), (32, 32))
            return o.sigmoid_gate(o.merge_heads(o.rms_norm(y, gain, 1e-6, zero_centred=True)), o.merge_heads(gate))

        yield from self.row_op("parts: rms_norm, sigmoid_gate", {"x": x}, lambda o, x: (gated(o, x),))
        yield from self.row_op(
            "parts: swiglu", {"x": x}, lambda o, x: (o.swiglu(*o.split(o.split(x, cuts)[4], (48, 48))),)
        )
        yield from self.row_op(
            "parts: rotary",
            {"x": x, "c": np.cos(angle), "s": np.sin(angle)},
            lambda o, x, c, s: (o.rotary(o.split_heads(o.split(x, cuts)[1], 8), c, s),),
        )
        yield from self.row_op(
            "parts: delta_gates",
            {"x": x},
            lambda o, x: o.delta_gates(o.split(x, cuts)[2], o.split(x, cuts)[3], a_log, dt),
            FLOAT_BOUND,
        )
        yield from self.row_op(
            "parts: l2_norm",
            {"x": mixed},
            lambda o, x: (o.l2_norm(o.split_heads(o.split(x, (96, 256))[1], 8), 1e-6, 0.25),),
            FLOAT_BOUND,
        )
        yield from self.row_op(
            "parts: gated_rms_norm",
            {"y": heads, "x": x},
            lambda o, y, x: (
                o.gated_rms_norm(y, o.split(o.split_heads(o.split(x, cuts)[1], 8), (32, 32))[1], gain, 1e-6),
            ),
        )

    # --- tokens and scores ---

    def tokens(self) -> Iterator[Result]:
        b, n, d = self.sizes()
        table = DenseWeight(self.half(500, d))
        ids = self.rng.integers(0, 500, (b, n)).astype(np.int32)
        yield from self.row_op("embed", {"ids": ids}, lambda o, i: (o.embed(table, i),), 0.0)
        index = self.rng.integers(0, n, (b, 2)).astype(np.int32)
        yield from self.row_op(
            "gather_rows", {"x": self.half(b, n, d), "i": index}, lambda o, x, i: (o.gather_rows(x, i),), 0.0
        )
        start = self.rng.integers(0, 900, b).astype(np.int32)
        yield from self.row_op(
            "token_positions", {"s": start, "i": ids}, lambda o, s, i: (o.token_positions(s, i),), 0.0
        )
        positions = self.rng.integers(0, 30000, (b, n)).astype(np.int32)
        frequencies = (1e4 ** -np.linspace(0, 1, 16)).astype(np.float32)
        yield from self.row_op(
            "rope_angles", {"p": positions}, lambda o, p: o.rope_angles(p, frequencies, 1.0), FLOAT_BOUND
        )
        for vocab in (8192, 1001, 65536, 248320):
            logits = self.half(b, n, vocab, scale=4)
            yield from self.row_op(f"arg_max {vocab}", {"x": logits}, lambda o, x: (o.arg_max(x),), 0.0)
            yield from self.row_op(f"top_k {vocab}", {"x": logits}, lambda o, x: o.top_k(x, 64), 0.0)
            yield from self.row_op(f"log_sum_exp {vocab}", {"x": logits}, lambda o, x: (o.log_sum_exp(x),), FLOAT_BOUND)
            yield from self.row_op(
                f"top_k and log_sum_exp {vocab}",
                {"x": logits},
                lambda o, x: (*o.top_k(x, 64), o.log_sum_exp(x)),
                FLOAT_BOUND,
            )
        few = np.round(self.half(b, n, 8192, scale=1))
        yield from self.row_op("top_k of many equal", {"x": few}, lambda o, x: o.top_k(x, 64), 0.0)


def _linear(ops: Any, x: Any, *, weight: Weight, bias: DenseWeight | None) -> tuple[object, ...]:
    return (ops.linear(x, weight, bias),)
