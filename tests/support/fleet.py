"""Real `serve` processes on one queue, started, signalled and scraped; and producers as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.daemons import TINY
from tests.support.redis_server import RedisServer, free_port, wait_until
from tests.support.scrape import get, total

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
PRODUCER = """
import asyncio, json, sys
from edgellm_producer import Producer

async def main(url, queue, name, count):
    async with Producer(url, queue=queue) as producer:
        jobs = await producer.submit_many(
            {"id": f"{name}-{n}", "prompt": f"def function_{n}(", "max_tokens": 4, "stream": n % 4 == 0,
             "temperature": 0.0 if n % 2 else 0.8, "priority": ("high", "normal", "low")[n % 3]}
            for n in range(count)
        )
        replies = await asyncio.gather(*(job.reply(timeout=150) for job in jobs))
    print(json.dumps({reply.id: [reply.status, reply.worker, reply.attempt] for reply in replies}))

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
"""


class ServeProcess:
    """One `edgellm-worker serve`. Its log is kept; leaving kills what still runs. `terminal`, the slave of a pty, takes
    the log's place and becomes the process's own terminal.
    """

    def __init__(self, server: RedisServer, queue: str, folder: Path, *flags: str, terminal: int | None = None) -> None:
        self.port = free_port()
        self.log = folder / f"worker-{self.port}.log"
        command = [str(Path(sys.executable).with_name("edgellm-worker")), "serve", "--queue", queue]
        command += ["--metrics-host", "127.0.0.1", "--metrics-port", str(self.port), "--lease-s", "1"]
        command += ["--max-input-len", "128", "--max-kv-cache-capacity", "512"]
        given = {"--model": str(TINY), "--redis-url": server.url, **dict(zip(flags[::2], flags[1::2], strict=True))}
        command += [word for pair in given.items() for word in pair]
        with self.log.open("w") as log:
            output = log if terminal is None else terminal
            self.process = subprocess.Popen(
                command if terminal is None else ["setsid", "--ctty", *command],
                env=os.environ | ONE_THREAD,
                stdin=terminal,
                stderr=output,
                stdout=output,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> tuple[int, str]:
        return get(self.port, path)

    def wait_ready(self) -> Self:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.get("/health/ready")[0] == 200

        wait_until(ready, "worker ready", 60.0)
        return self

    def value(self, name: str, **labels: str) -> float:
        return total(self.get("/metrics")[1], name, **labels)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def producer_process(server: RedisServer, queue: str, name: str, count: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PRODUCER, server.url, queue, name, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def outcome(process: subprocess.Popen[str]) -> dict[str, tuple[str, str, int]]:
    """What the producer's jobs came to: id -> status, worker, attempt."""
    output, _ = process.communicate(timeout=160)
    assert process.returncode == 0
    return {job_id: tuple(row) for job_id, row in json.loads(output).items()}
