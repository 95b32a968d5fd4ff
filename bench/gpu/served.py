"""`edgellm-worker` commands and workers as processes, as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.support.scrape import get, total

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0


def program() -> list[str]:
    """The installed command, or the same entry point where the package is only on the path."""
    installed = Path(sys.executable).with_name("edgellm-worker")
    if installed.exists():
        return [str(installed)]
    return [sys.executable, "-c", "import sys; from edgellm_worker.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Finished:
    code: int
    output: str
    seconds: float


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*program(), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def command(*arguments: str, limit_s: float = 240.0) -> Finished:
    began = time.monotonic()
    process = start(*arguments)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return Finished(process.returncode, output, time.monotonic() - began)


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.02)


class Worker:
    """One `serve`; leaving kills what still runs."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / f"serve-{self.port}.log"
        words = ["serve", "--metrics-host", "127.0.0.1", "--metrics-port", str(self.port), "--log-format", "json"]
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*program(), *words, *flags], stdout=log, stderr=log, env=dict(os.environ))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait_ready(self) -> float:
        """-> seconds from its start."""

        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            return self.get("/health/ready")[0] == 200

        wait_until(is_ready, "a ready worker", START_LIMIT_S)
        return time.monotonic() - self.began

    def redis_url(self) -> str:
        """Where its embedded server listens, as the log's "ready" line says."""
        wait_until(lambda: self._ready_line() is not None, "a ready line in the log", 10.0)
        return str((self._ready_line() or {})["redis"])

    def _ready_line(self) -> dict[str, str] | None:
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == "ready":
                    return dict(entry)
        return None

    def get(self, path: str) -> tuple[int, str]:
        return get(self.port, path)

    def value(self, name: str) -> float:
        return total(self.get("/metrics")[1], name)

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=STOP_LIMIT_S)

    def hidden_failures(self) -> list[str]:
        """Log lines at warning or above."""
        return [line for line in self.log.read_text().splitlines() if re.search(r'"level": ?"(error|warning)"', line)]
