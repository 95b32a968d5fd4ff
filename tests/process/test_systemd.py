"""The worker as systemd sees it: READY when it serves, signs of life, STOPPING on SIGTERM, exit by the signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.live_worker import CHECKPOINT


def test_a_service_life(tmp_path: Path):
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor, (tmp_path / "log").open("w+b") as log:
        supervisor.bind(str(path))
        supervisor.settimeout(60)

        def told(word: str) -> None:
            """Wait for a message that says this; silence fails by the socket's timeout."""
            while word not in supervisor.recv(256).decode().splitlines():
                pass

        command = [
            str(Path(sys.executable).with_name("edgellm-worker")),
            "serve",
            "--embedded",
            "--model",
            str(CHECKPOINT),
        ]
        environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "1000000", "OPENBLAS_NUM_THREADS": "1"}
        with subprocess.Popen(
            [*command, "--metrics-host", "127.0.0.1", "--metrics-port", "0"], env=os.environ | environment, stderr=log
        ) as worker:
            told("READY=1")
            told("WATCHDOG=1")
            told("WATCHDOG=1")
            worker.send_signal(signal.SIGTERM)
            told("STOPPING=1")
            code = worker.wait(timeout=60)
        log.seek(0)
        assert code == 143, log.read()
