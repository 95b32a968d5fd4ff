"""Opening a 27B-shaped checkpoint and decoding NVFP4.

    python bench/checkpoint.py [--json FILE]

open     sparse files of the public Qwen3.6-27B-NVFP4's names, dtypes, shapes and sizes (real headers, index, configs
         and scales; weights that are holes), opened with every part resolved. A fresh process each time, so that the
         resident memory is that of opening alone; its peak before opening (interpreter, numpy) is told apart.
values   reading whole tensors for NaN and infinity, GB/s from the page cache
decode   NVFP4 to float32, MB of packed input a second, one thread; CPU time. Beside it, as what plain numpy gives: two
         nibble look-ups and a broadcast multiplication.

Limits to keep: open under 2 s and 300 MB, decode at least 150 MB/s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.decode import E2M1, decode
from edgellm_worker.engine.checkpoint.weights import Nvfp4Weight

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "golden" / "configs"
NAME = "nvidia--Qwen3.6-27B-NVFP4"
REPEATS = 5

CHILD = """
import json, resource, sys, time
from pathlib import Path
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
checkpoint = open_checkpoint(Path(sys.argv[1]), read_values=False)
seconds = time.perf_counter() - start
checkpoint.base.weight("layers.0.mlp.down_proj"), checkpoint.draft.weight("fc")
print(json.dumps({"seconds": seconds, "peak_mib": peak(), "before_mib": before}))
"""


def make_folder(folder: Path) -> tuple[int, int]:
    """(tensors, bytes)"""
    sys.path.insert(0, str(ROOT))
    from tests.support.sparse_checkpoints import model_tensors, write_sparse

    config = json.loads((CONFIGS / f"{NAME}_config.json").read_text())
    layers = json.loads((CONFIGS / f"{NAME}_hf_quant_config.json").read_text())["quantization"]["quantized_layers"]
    tensors = model_tensors(config, layers, "model.language_model.")
    write_sparse(folder, tensors)
    for file in ("config.json", "hf_quant_config.json"):
        shutil.copy(CONFIGS / f"{NAME}_{file}", folder / file)
    return len(tensors), sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure_open() -> dict[str, float]:
    """The slowest of the repeats."""
    with tempfile.TemporaryDirectory() as place:
        num_tensors, num_bytes = make_folder(Path(place))
        command = [sys.executable, "-W", "ignore", "-c", CHILD, place]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(REPEATS)]
    worst = {key: max(run[key] for run in runs) for key in runs[0]}
    return {"tensors": num_tensors, "gigabytes": num_bytes / 1e9, **worst}


def measure_values() -> float:
    """GB/s, the packaged checkpoint repeated."""
    import edgellm_worker

    folder = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
    size = (folder / "model.safetensors").stat().st_size

    def seconds(*, read_values: bool) -> float:
        start = time.process_time()
        for _ in range(REPEATS):
            open_checkpoint(folder, read_values=read_values)
        return time.process_time() - start

    seconds(read_values=True)
    return REPEATS * size / 1e9 / (seconds(read_values=True) - seconds(read_values=False))


def plain_numpy(weight: Nvfp4Weight) -> np.ndarray:
    codes = np.stack([weight.data & 15, weight.data >> 4], axis=-1).reshape(len(weight.data), -1, 16)
    scales = weight.block_scale.astype(np.float32) * weight.global_scale
    return (E2M1[codes] * scales[..., None]).reshape(weight.shape)


def rate(function: Callable[[Nvfp4Weight], np.ndarray], weight: Nvfp4Weight) -> float:
    """MB of packed input per second of CPU time, the best of the repeats."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        function(weight)
        times.append(time.process_time() - start)
    return weight.data.nbytes / 1e6 / min(times)


def random_weight(num_out: int, num_in: int) -> Nvfp4Weight:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (num_out, num_in // 2)).astype(np.uint8)
    scales = rng.integers(1, 0x7F, (num_out, num_in // 16)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    return Nvfp4Weight(data, scales, np.float32(0.0123))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    opened = measure_open()
    print(
        f"open: {opened['tensors']:.0f} tensors, {opened['gigabytes']:.1f} GB in {opened['seconds']:.2f} s, "
        f"peak {opened['peak_mib']:.0f} MiB (of which {opened['before_mib']:.0f} before opening)"
    )
    values = measure_values()
    print(f"values: {values:.2f} GB/s")
    decoded = {}
    for shape in ((768, 256), (768, 1024), (17408, 5120)):
        weight = random_weight(*shape)
        ours, theirs = rate(decode, weight), rate(plain_numpy, weight)
        decoded[f"{shape[0]}x{shape[1]}"] = {"mb_per_s": ours, "plain_numpy_mb_per_s": theirs}
        print(
            f"decode {shape[0]}x{shape[1]}: {ours:.0f} MB/s packed, plain numpy {theirs:.0f}, ratio {ours / theirs:.1f}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"open": opened, "values_gb_per_s": values, "decode": decoded}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
