"""A real worker process on the bundled checkpoint, with a server of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import edgellm_worker
from edgellm_worker.embedded import EmbeddedServer
from tests.support.prometheus import free_port

CHECKPOINT = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class LiveWorker:
    redis_url: str
    metrics_port: int

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.metrics_url + path, timeout=5) as response:  # noqa: S310 - our own server
            return response.read().decode()


@contextmanager
def live_worker(*flags: str) -> Iterator[LiveWorker]:
    """Ready to serve when entered; drained when left."""
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | dict(os.environ)
    port = free_port()
    with EmbeddedServer() as server:
        command = [str(Path(sys.executable).with_name("edgellm-worker")), "serve", "--model", str(CHECKPOINT)]
        command += ["--redis-url", server.url, "--metrics-host", "127.0.0.1", "--metrics-port", str(port), *flags]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            worker = LiveWorker(server.url, port)
            try:
                _await_ready(worker, process)
                yield worker
            finally:
                process.terminate()
                process.communicate(timeout=STOP_TIMEOUT_S)


def _await_ready(worker: LiveWorker, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the worker ended: {process.communicate()[1]}")
        try:
            worker.get("/health/ready")
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"{worker.metrics_url}/health/ready")
