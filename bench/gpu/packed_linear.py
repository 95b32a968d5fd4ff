"""Products with packed weights on the GPU, by themselves: parity, and time over what reading the weight costs.

    python bench/gpu/packed_linear.py

Needs cuda-python, numpy and ml_dtypes, no TensorRT. With torch installed its float16 product is timed beside it. The
floor is half of a device-to-device copy of the weight's bytes (a copy reads and writes them). Weights take turns over
more memory than the L2 cache holds; all times are medians over replays of one CUDA graph.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import Array, Fp8Weight, Nvfp4Weight
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.packed_linear import Operands, PackedLinear
from edgellm_worker.engine.runtime.packed_weights import factor, pack_data, pack_scales

try:
    import torch
except ImportError:
    torch = None

# [N, K] of the 27B: feed-forward, its way back, the joint projection of Gated DeltaNet, attention's k and v, the head
SHAPES = ((17408, 5120), (5120, 17408), (10240, 5120), (5120, 6144), (1024, 5120), (128, 256), (248320, 5120))
ROWS = (1, 6, 24, 48)
ROTATED_BYTES = 1 << 30
WARM_S = 0.03
BOUND = 1e-3  # of float16 results: half a unit in the last place is 4.9e-4 of the value


def say(*words: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, flush=True)


def random_weight(rng: np.random.Generator, n: int, k: int, *, is_fp4: bool) -> Fp8Weight | Nvfp4Weight:
    """Every code there is; scales of many sizes, among them subnormal ones."""
    if is_fp4:
        scales = rng.integers(0, 127, (n, k // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
        return Nvfp4Weight(rng.integers(0, 256, (n, k // 2), np.uint8), scales, np.float32(3.1e-4))
    codes = rng.integers(0, 256, (n, k), np.uint8)
    codes[codes & 127 == 127] = 0  # not a number
    return Fp8Weight(codes.view(ml_dtypes.float8_e4m3fn), np.float32(2.3e-3))


class Bench:
    def __init__(self) -> None:
        self.cuda = Cuda()
        self.products = PackedLinear(self.cuda)
        self.rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 7)

    def upload(self, data: Array, scales: Array, copies: int) -> list[tuple[int, int]]:
        return [(self.cuda.upload(data), self.cuda.upload(scales) if scales.size else 0) for _ in range(copies)]

    def free(self, pointers: list[tuple[int, int]]) -> None:
        for pair in pointers:
            for pointer in filter(None, pair):
                self.cuda._call("cuMemFree", pointer)
                self.cuda._allocations.remove(pointer)

    # --- parity ---

    def parity(self, n: int, k: int, rows: tuple[int, ...], *, is_fp4: bool, bias: bool) -> Iterator[dict[str, Any]]:
        weight = random_weight(self.rng, n, k, is_fp4=is_fp4)
        most = max(rows)
        x = self.rng.standard_normal((most, k)).astype(np.float16)
        offset = (self.rng.standard_normal(n) * 10).astype(np.float32) if bias else None
        want = product(x, decode(weight)) + (0 if offset is None else offset)
        (pointers,) = self.upload(pack_data(weight), pack_scales(weight), 1)
        x_at, y_at = self.cuda.upload(x), self.cuda.allocate(2 * (most + 1) * n)
        bias_at = 0 if offset is None else self.cuda.upload(offset)
        for m in rows:
            self.cuda._call("cuMemsetD8Async", y_at, 0x7E, 2 * (most + 1) * n, self.cuda.stream)  # not a number
            operands = Operands(x_at, *pointers, bias_at, y_at, m, n, k, factor(weight))
            launch = self.products.prepare(operands, is_fp4=is_fp4)
            launch()
            once = self.cuda.download(y_at, (most + 1, n), np.float16)
            launch()
            again = self.cuda.download(y_at, (m, n), np.float16)
            difference = np.abs(once[:m].astype(np.float64) - want[:m])
            size = np.sqrt((want[:m] ** 2).mean())
            yield {
                "n": n, "k": k, "m": m, "fp4": is_fp4, "bias": bias,
                "error": float((difference / np.maximum(np.abs(want[:m]), size)).max()),
                "same_bits": bool((once[:m].view(np.uint16) == again.view(np.uint16)).all()),
                "past_the_end": bool(np.isnan(once[m:].astype(np.float32)).all()),
            }  # fmt: skip
        self.free([pointers, (x_at, y_at), (bias_at, 0)])

    # --- time ---

    def median_us(self, launches: list[Callable[[], None]], replays: int = 15) -> float:
        """Microseconds of one of the launches, which run one after another in one graph."""
        for launch in launches:
            launch()
        graph = self.cuda.capture(lambda: [launch() for launch in launches] and None)
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_S:  # clocks fall while the host makes weights
            graph.launch()
            self.cuda.synchronize()
        times = []
        for _ in range(replays):
            with self.cuda.timer() as elapsed:
                graph.launch()
            times.append(elapsed())
        return median(times) / len(launches) * 1e3

    def floors(self, n: int, k: int, rows: tuple[int, ...], *, is_fp4: bool) -> Iterator[dict[str, Any]]:
        size = n * k // 2 + n * k // 16 if is_fp4 else n * k
        copies = max(4, min(64, ROTATED_BYTES // size))
        some = self.rng.integers(8, 120, 1 << 20, np.uint8)
        data = np.resize(some, n * k // (2 if is_fp4 else 1))
        scales = np.resize(some, n * k // 16 if is_fp4 else 0)
        pointers = self.upload(data, scales, copies)
        target = self.cuda.allocate(size)
        copy_us = self.median_us([lambda p=p: self.cuda.copy(target, p[0], data.nbytes) for p in pointers])
        floor_us = copy_us / 2 * size / data.nbytes
        x = self.cuda.upload(self.rng.standard_normal((max(rows), k)).astype(np.float16))
        y = self.cuda.allocate(2 * max(rows) * n)
        for m in rows:
            launches = [self.products.prepare(Operands(x, *p, 0, y, m, n, k, 1e-3), is_fp4=is_fp4) for p in pointers]
            us = self.median_us(launches)
            yield {
                "n": n, "k": k, "m": m, "fp4": is_fp4, "floor_us": floor_us, "us": us,
                "half_us": half_product_us(n, k, m),
            }  # fmt: skip
        self.free([*pointers, (target, x), (y, 0)])


def product(x: Array, weight: Array) -> Array:
    """float64 where a GPU does it, else float32 sums of float32 products."""
    if torch is None:
        return (x.astype(np.float32) @ weight.T).astype(np.float64)
    a, b = (torch.from_numpy(np.ascontiguousarray(part)).cuda().double() for part in (x, weight))
    return (a @ b.T).cpu().numpy()


def half_product_us(n: int, k: int, m: int) -> float | None:
    if torch is None or n > 100_000:
        return None
    count = max(4, ROTATED_BYTES // (2 * n * k))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) for _ in range(count)]
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    for weight in weights[:2]:
        torch.nn.functional.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            torch.nn.functional.linear(x, weight)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times) / count * 1e3


def main() -> int:
    bench, faults, parity, floors = Bench(), 0, [], []
    odd = (1, 2, 3, 5, 7, 8, 9, 13, 17, 24, 25, 31, 33, 40, 48, 57, 63, 64, 65, 128, 200)
    cases = [
        (17408, 5120, (1, 7, 24, 64)),
        (5120, 17408, (1, 6, 48)),
        (1024, 5120, odd),
        (272, 208, odd),
        (16, 16, (1, 64)),
    ]
    for is_fp4 in (True, False):
        for n, k, rows in cases:
            found = list(bench.parity(n, k, rows, is_fp4=is_fp4, bias=n < 2000))
            bad = [r for r in found if r["error"] > BOUND or not r["same_bits"] or not r["past_the_end"]]
            faults += len(bad)
            parity += found
            worst = max(r["error"] for r in found)
            say(f"parity {'nvfp4' if is_fp4 else 'fp8'} [{n}, {k}]: worst {worst:.2e} of {len(found)}, bad {bad[:3]}")
    for is_fp4 in (True, False) if not faults else ():
        for n, k in SHAPES:
            for row in bench.floors(n, k, ROWS, is_fp4=is_fp4):
                floors.append(row)
                half = "" if row["half_us"] is None else f", float16 {row['half_us']:.1f} us"
                kind, ratio = "nvfp4" if is_fp4 else "fp8", row["us"] / row["floor_us"]
                say(
                    f"{kind} [{n}, {k}] rows {row['m']}: {row['us']:.1f} us, {ratio:.2f} of {row['floor_us']:.1f}{half}"
                )
    out = Path(os.environ.get("OUT", "."))
    (out / "packed_linear.json").write_text(json.dumps({"parity": parity, "floors": floors}, indent=1))
    bench.cuda.close()
    say(f"packed_linear: {faults} faults in {len(parity)} comparisons")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
