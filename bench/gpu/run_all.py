"""Everything that needs a GPU, step by step, each in its own process under its own limit, logs as they come.

    python bench/gpu/run_all.py [STEP ...]        results under $OUT (else the working directory)

Without a GPU or a TensorRT library it says so and exits 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bench.gpu.harness import ROOT
from edgellm_worker.engine.errors import EngineFault
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.trt import load_library

STEPS = {
    "parity": (["bench/gpu/op_parity.py"], 240),
    "packed": (["bench/gpu/packed_linear.py"], 120),
    "quantized": (["bench/gpu/quantized_generation.py"], 240),
    "delta": (["bench/gpu/floors.py", "delta"], 90),
    "bundle": (["bench/gpu/floors.py", "bundle"], 120),
    "generation": (["bench/gpu/generation.py"], 300),
    "main job": (["bench/gpu/main_job.py"], 420),
    "tiny": (["bench/gpu/floors.py", "tiny"], 240),
    "dense": (["bench/gpu/floors.py", "dense"], 300),
}


def device() -> str:
    """What there is to run on. Raises `EngineFault` where there is no GPU or no TensorRT library."""
    library = load_library()
    with Cuda() as cuda:
        return f"{cuda.name}, {cuda.architecture}, {library.name}"


def run_step(name: str) -> int:
    """-> the step's exit code, 124 when it ran past its limit."""
    arguments, limit_s = STEPS[name]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/worker:{ROOT}/producer", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    try:
        command = [sys.executable, *arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 124
    print(f"== {name}: exit {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def main(names: list[str]) -> int:
    try:
        print(device(), flush=True)
    except EngineFault as error:
        print(f"skipped: no GPU to run on ({error})")
        return 0
    failed = [name for name in names or list(STEPS) if run_step(name)]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
