"""Every op on the GPU against NumpyOps, with random shapes and values: max relative error per op and dtype.

python bench/gpu/op_parity.py [SEED]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from bench.gpu.harness import Device, relative_error, save, say
from bench.gpu.op_cases import F16, F32, FLOAT_BOUND, HALF_BOUND, I32, Result, RowCases
from edgellm_worker.engine.checkpoint.weights import Array, DenseWeight, KvScales
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending, KvCache, KvDtype
from edgellm_worker.engine.ops.graph import Dtype, Lowering
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.ops.tensorrt import TensorRtOps
from edgellm_worker.engine.runtime.tensorrt_kernels import Mode


class Cases(RowCases):
    """And those that look at state."""

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
