"""A real worker process on the bundled checkpoint, with a server of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import edgellm_worker
from edgellm_worker.embedded import EmbeddedServer
from tests.support.redis_server import free_port

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
    # Logs go to a file: a pipe that nobody reads would fill up and stop the worker.
    with EmbeddedServer() as server, tempfile.TemporaryFile("w+") as log:
        command = [str(Path(sys.executable).with_name("edgellm-worker")), "serve", "--model", str(CHECKPOINT)]
        command += ["--redis-url", server.url, "--metrics-host", "127.0.0.1", "--metrics-port", str(port), *flags]
        with subprocess.Popen(command, env=environment, stderr=log) as process:
            worker = LiveWorker(server.url, port)
            try:
                _await_ready(worker, process, log)
                yield worker
            finally:
                process.terminate()
                process.wait(timeout=STOP_TIMEOUT_S)


def _await_ready(worker: LiveWorker, process: subprocess.Popen[bytes], log: TextIO) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"the worker ended: {log.read()}")
        try:
            worker.get("/health/ready")
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"{worker.metrics_url}/health/ready")
