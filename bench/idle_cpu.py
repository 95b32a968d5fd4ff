"""CPU of an idle worker: `python -m bench.idle_cpu [--seconds 20]`. The bound is 1% of one core.

A real `serve` process (and its engine child) on an embedded server, ready and without jobs. Measured is the user and
system time of both processes over the interval, from the kernel's accounting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

import edgellm_worker
from edgellm_worker.embedded import EmbeddedServer

BOUND_PERCENT = 1.0
TINY = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the worker did not get ready")


def measure(seconds: float, port: int) -> dict[str, float]:
    with EmbeddedServer() as server:
        command = [str(Path(sys.executable).with_name("edgellm-worker")), "serve", "--model", str(TINY)]
        command += ["--redis-url", server.url, "--metrics-host", "127.0.0.1", "--metrics-port", str(port)]
        with subprocess.Popen(command, env=os.environ | ONE_THREAD, stderr=subprocess.DEVNULL) as process:
            try:
                wait_ready(port)
                time.sleep(2.0)  # the start's own work is over
                parent = psutil.Process(process.pid)
                worker = [parent, *parent.children(recursive=True)]
                before, began = cpu_s(worker), time.monotonic()
                time.sleep(seconds)
                used, wall = cpu_s(worker) - before, time.monotonic() - began
            finally:
                process.terminate()
    return {
        "seconds": round(wall, 1),
        "worker_cpu_percent": round(100 * used / wall, 2),
        "bound_percent": BOUND_PERCENT,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=19108)
    arguments = parser.parse_args()
    result = measure(arguments.seconds, arguments.port)
    print(json.dumps(result))
    return 0 if result["worker_cpu_percent"] < BOUND_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
