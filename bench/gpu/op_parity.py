"""Every op on the GPU against NumpyOps, with random shapes and values: max relative error per op and dtype.

python bench/gpu/op_parity.py [SEED]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu.harness import Device, relative_error, save, say
from edgellm_worker.engine.build.weight_policy import WeightPolicy, WeightReader
from edgellm_worker.engine.checkpoint.weights import Array, DenseWeight, Fp8Weight, KvScales, Nvfp4Weight, Weight
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending, KvCache, KvDtype
from edgellm_worker.engine.ops.graph import Dtype, Lowering, Value
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.ops.tensorrt import Reader, TensorRtOps
from edgellm_worker.engine.runtime.tensorrt_kernels import Mode

F32, F16, I32 = Dtype.FLOAT32, Dtype.FLOAT16, Dtype.INT32
HALF_BOUND, FLOAT_BOUND = 2e-3, 2e-5


@dataclass(frozen=True)
class Result:
    op: str
    dtype: str
    shape: str
    error: float
    bound: float


class Cases:
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

    # --- kernels ---

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

    def attend(
        self, heads: tuple[int, int, int], tokens: int, kv: KvDtype, starts: list[int], length: int = 512
    ) -> Iterator[Result]:
        """Slots are permuted, positions past a row's own are rubbish."""
        num_heads, num_kv, dim = heads
        b = len(starts)
        order = self.rng.permutation(b).astype(np.int32)
        scale = 0.05 if kv is KvDtype.FP8 else 1.0
        q, k, v = (
            self.half(b, tokens, num_heads, dim),
            self.half(b, tokens, num_kv, dim),
            self.half(b, tokens, num_kv, dim),
        )
        stored = ml_dtypes.float8_e4m3fn if kv is KvDtype.FP8 else np.float16
        caches = [(self.normal(b, num_kv, length, dim) / scale).clip(-448, 448).astype(stored) for _ in range(2)]
        start = np.array(starts, np.int32)
        scales = KvScales(np.float32(scale), np.float32(scale))
        ops = TensorRtOps()
        dtype = Dtype.FP8 if kv is KvDtype.FP8 else F16
        qkv = tuple(ops.input(name, x.shape, F16) for name, x in (("q", q), ("k", k), ("v", v)))
        cache = KvCache(*(ops.input(name, caches[0].shape, dtype) for name in ("ck", "cv")), kv, scales)
        out, _ = ops.attend((qkv[0], qkv[1], qkv[2]), cache, ops.input("start", (b,), I32), dim**-0.5)
        raw = [c.view(np.uint8) if kv is KvDtype.FP8 else c for c in caches]
        by_slot = [np.empty_like(x) for x in raw]
        for row, slot in enumerate(order):
            for target, source in zip(by_slot, raw, strict=True):
                target[slot] = source[row]
        feeds = {"q": q, "k": k, "v": v, "ck": by_slot[0], "cv": by_slot[1], "start": start, "slots": order}
        found = self.device.run(ops.graph({"out": out}), feeds)
        kept = KvCache(caches[0].copy(), caches[1].copy(), kv, scales)
        floats = (q.astype(np.float32), k.astype(np.float32), v.astype(np.float32))
        want, after = self.reference.attend(floats, kept, start, dim**-0.5)
        name = f"attend {num_heads}/{num_kv}x{dim} N={tokens}"
        yield Result(name, f"kv {kv}", str(q.shape), relative_error(found["out"], want), 2e-3)
        for label, mine, theirs in (("ck'", found["ck'"], after.k), ("cv'", found["cv'"], after.v)):
            decoded = mine.view(ml_dtypes.float8_e4m3fn) if kv is KvDtype.FP8 else mine
            again = np.stack([decoded[slot] for slot in order]).astype(np.float32)
            yield Result(f"{name} {label}", f"kv {kv}", "", relative_error(again, theirs.astype(np.float32)), 1e-6)

    def attend_joint(self, heads: tuple[int, int, int], tokens: int, starts: list[int], half: int) -> Iterator[Result]:
        """Queries, keys and values out of one joint product, normed and rotated before."""
        num_heads, num_kv, dim = heads
        b, length = len(starts), 1024
        sizes = (num_heads * 2 * dim, num_kv * dim, num_kv * dim)
        angle = self.normal(b, tokens, half)
        norms = self.weight(dim), self.weight(dim)
        feeds: dict[str, Array] = {"x": self.half(b, tokens, sum(sizes)), "c": np.cos(angle), "s": np.sin(angle)}
        feeds["ck"], feeds["cv"] = self.half(b, num_kv, length, dim), self.half(b, num_kv, length, dim)
        feeds["start"] = np.array(starts, np.int32)
        one = KvScales(np.float32(1), np.float32(1))

        def call(o: NumpyOps, x: Array, angles: tuple[Array, Array], kept: tuple[Array, Array], start: Array) -> Array:
            q, k, v = o.split(x, sizes)
            q, _ = o.split(o.split_heads(q, num_heads), (dim, dim))
            k, v = o.split_heads(k, num_kv), o.split_heads(v, num_kv)
            q, k = o.rms_norm(q, norms[0], 1e-6, zero_centred=True), o.rms_norm(k, norms[1], 1e-6, zero_centred=True)
            cache = KvCache(*kept, KvDtype.FLOAT16, one)
            return o.attend((o.rotary(q, *angles), o.rotary(k, *angles), v), cache, start, dim**-0.5)[0]

        dtypes = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.int32): I32}
        ops = TensorRtOps()
        x, c, s, ck, cv, start = (ops.input(name, given.shape, dtypes[given.dtype]) for name, given in feeds.items())
        out = call(ops, x, (c, s), (ck, cv), start)
        found = self.device.run(ops.graph({"out": out}), feeds)
        x, *angles = (feeds[name].astype(np.float32) for name in ("x", "c", "s"))
        want = call(self.reference, x, tuple(angles), (feeds["ck"].copy(), feeds["cv"].copy()), feeds["start"])
        name = f"joint product, norms, rotary, attend {num_heads}/{num_kv}x{dim} N={tokens}"
        yield Result(name, "float16", "", relative_error(found["out"], want), HALF_BOUND)

    def delta_inputs(self, b: int, n: int, sizes: tuple[int, int, int, int], closing: bool) -> dict[str, Array]:
        hk, hv, dk, dv = sizes
        unit = [
            x / np.linalg.norm(x, axis=-1, keepdims=True)
            for x in (self.normal(b, n, hk, dk), self.normal(b, n, hk, dk))
        ]
        return {
            "q": (unit[0] * dk**-0.5).astype(np.float32),
            "k": unit[1].astype(np.float32),
            "v": self.normal(b, n, hv, dv),
            "log_g": -np.abs(self.normal(b, n, hv)) * np.float32(30.0 if closing else 0.1),
            "beta": (1 / (1 + np.exp(-self.normal(b, n, hv)))).astype(np.float32),
        }

    def delta(
        self, sizes: tuple[int, int, int, int], tokens: int, commit: list[int], *, closing: bool = False
    ) -> Iterator[Result]:
        """The step: fold, run, leave pending in the other half."""
        hk, hv, dk, dv = sizes
        b, rows = len(commit), max(8, tokens)
        slots = self.rng.permutation(b + 1)[:b].astype(np.int32)
        parity = self.rng.integers(0, 2, b + 1).astype(np.int32)
        new, old = self.delta_inputs(b, tokens, sizes, closing), self.delta_inputs(b, rows, sizes, closing)
        state = self.normal(b, hv, dk, dv)
        feeds: dict[str, Array] = {**new, "commit": np.array(commit, np.int32), "slots": slots, "parity": parity}
        feeds["state"] = self.normal(b + 1, hv, dk, dv)
        feeds["pk"], feeds["pu"] = self.normal(2 * (b + 1), rows, hk, dk), self.normal(b + 1, rows, hv, dv)
        feeds["pg"] = self.normal(2 * (b + 1), rows, hv)
        for row, slot in enumerate(slots):
            half = 2 * slot + parity[slot]
            feeds["state"][slot], feeds["pu"][slot] = state[row], old["v"][row]
            feeds["pk"][half], feeds["pg"][half] = old["k"][row], old["log_g"][row]
        ops = TensorRtOps()
        values = {name: ops.input(name, array.shape, F32) for name, array in feeds.items() if array.dtype == np.float32}
        pending = DeltaPending(values["pk"], values["pu"], values["pg"])
        inputs = DeltaInputs(*(values[name] for name in ("q", "k", "v", "log_g", "beta")))
        out, _, _ = ops.gated_delta_rule(inputs, values["state"], pending, ops.input("commit", (b,), I32))
        found = self.device.run(ops.graph({"out": out}), feeds)
        want, folded, left = self.reference.gated_delta_rule(
            DeltaInputs(*(new[name] for name in ("q", "k", "v", "log_g", "beta"))),
            state, DeltaPending(old["k"], old["v"], old["log_g"]), feeds["commit"],
        )  # fmt: skip
        name = f"delta {sizes} N={tokens} commit={commit}{' closing' if closing else ''}"
        yield Result(name, "float32", "", relative_error(found["out"], want), 5e-5)
        mine = np.stack([found["state'"][slot] for slot in slots])
        yield Result(f"{name} state", "float32", "", relative_error(mine, folded), 5e-5)
        halves = [2 * slot + (parity[slot] ^ 1) for slot in slots]
        k_after = np.stack([found["pk'"][half, :tokens] for half in halves])
        u_after = np.stack([found["pu'"][slot, :tokens] for slot in slots])
        yield Result(f"{name} pending k", "float32", "", relative_error(k_after, left.k), 0.0)
        yield Result(f"{name} pending u", "float32", "", relative_error(u_after, left.u), 5e-5)

    def fold(self, sizes: tuple[int, int, int, int], tokens: int, commit: list[int]) -> Iterator[Result]:
        b = len(commit)
        old = self.delta_inputs(b, tokens, sizes, closing=False)
        state = self.normal(b, sizes[1], sizes[2], sizes[3])
        ops = TensorRtOps()
        names = {"state": state, "k": old["k"], "u": old["v"], "g": old["log_g"]}
        values = {name: ops.input(name, array.shape, F32) for name, array in names.items()}
        pending = DeltaPending(values["k"], values["u"], values["g"])
        ops.delta_fold(values["state"], pending, ops.input("commit", (b,), I32))
        found = self.device.run(ops.graph({}), {**names, "commit": np.array(commit, np.int32)}, Mode.PREFILL)
        want = self.reference.delta_fold(
            state, DeltaPending(old["k"], old["v"], old["log_g"]), np.array(commit, np.int32)
        )
        yield Result(f"delta_fold {sizes} N={tokens}", "float32", "", relative_error(found["state'"], want), 5e-5)

    def conv(self, channels: int, tokens: int, commit: list[int]) -> Iterator[Result]:
        b, rows = len(commit), 8
        weight = DenseWeight(self.normal(channels, 1, 4))
        x, tail, pending = self.half(b, tokens, channels), self.half(b, 3, channels), self.half(b, rows, channels)
        feeds = {"x": x, "tail": tail, "pending": pending, "commit": np.array(commit, np.int32)}
        ops = TensorRtOps()
        values = {name: ops.input(name, feeds[name].shape, F16) for name in ("x", "tail", "pending")}
        kept = ops.conv_commit(values["tail"], values["pending"], ops.input("commit", (b,), I32))
        found = self.device.run(ops.graph({"out": ops.causal_conv(values["x"], kept, weight)}), feeds)
        want_tail = self.reference.conv_commit(tail, pending, feeds["commit"])
        want = self.reference.causal_conv(x.astype(np.float32), want_tail.astype(np.float32), weight)
        yield Result(
            f"causal_conv C={channels} N={tokens}", "float16 in", "", relative_error(found["out"], want), FLOAT_BOUND
        )
        yield Result("conv_commit tail", "float16", "", relative_error(found["tail'"], want_tail), 0.0)
        yield Result("conv pending", "float16", "", relative_error(found["pending'"][:, :tokens], x), 0.0)

    def all(self) -> Iterator[Result]:
        yield from self.rows()
        yield from self.quantized()
        yield from self.packed()
        yield from self.parts()
        yield from self.tokens()
        yield from self.attend_joint((16, 4, 128), 6, [0, 300, 15, 1018], 64)
        yield from self.attend_joint((24, 4, 256), 6, [512, 600], 32)
        yield from self.attend_joint((4, 2, 64), 4, [37, 513, 16], 8)
        yield from self.attend_joint((4, 2, 64), 40, [37], 8)
        for kv in (KvDtype.FLOAT16, KvDtype.FP8):
            yield from self.attend((4, 2, 64), 4, kv, [0, 17, 300])
            yield from self.attend((16, 4, 128), 6, kv, [100, 0, 250, 506])
            yield from self.attend((24, 4, 256), 6, kv, [127, 128])
            yield from self.attend((4, 2, 64), 100, kv, [37])
            yield from self.attend((16, 4, 128), 6, kv, [1900, 511, 1025, 4000], 4096)
            yield from self.attend((24, 4, 256), 4, kv, [2000, 9000], 16384)
        tiny, large = (4, 8, 32, 32), (16, 48, 128, 128)
        for sizes in (tiny, large):
            yield from self.delta(sizes, 1, [0, 1, 3])
            yield from self.delta(sizes, 6, [6, 0, 2, 5])
            yield from self.delta(sizes, 6, [6, 1], closing=True)
            yield from self.fold(sizes, 64, [64, 0, 33])
        yield from self.delta(tiny, 64, [8, 0])
        yield from self.conv(512, 4, [0, 3, 8])
        yield from self.conv(10240, 6, [1, 6])


def _linear(ops: Any, x: Any, *, weight: Weight, bias: DenseWeight | None) -> tuple[object, ...]:
    return (ops.linear(x, weight, bias),)


def main(seed: int, lowering: Lowering | None) -> int:
    device = Device(0, lowering)
    say(device.describe())
    results = []
    failed = 0
    for result in Cases(device, seed).all():
        is_good = result.error <= result.bound
        failed += not is_good
        results.append(result)
        word = "ok  " if is_good else "FAIL"
        where = f"{result.op:44s} {result.dtype} {result.shape}"
        say(f"{word} {result.error:9.2e} <= {result.bound:.0e}  {where}")
    save("op_parity.json", [vars(result) for result in results])
    say(f"op parity: {len(results)} comparisons, {failed} failed, seed {seed}")
    return int(failed > 0)


if __name__ == "__main__":
    chosen = Lowering(sys.argv[2]) if len(sys.argv) > 2 else None
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, chosen))
