"""This product, behind two engines that answer at once.

`queue`: the worker's queue side, with an answer made beside it. `daemon`: what `edgellm-worker serve` runs (metrics
port, telemetry, tokenizer, batches, outbox, a log line per job), every setting at its default but `--max-batch-size`,
with an engine whose rows are complete after one step in place of a model's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from unittest.mock import patch

from peer import CONCURRENCY, URL
from pydantic import SecretStr
from server import Server

from edgellm_producer import Producer
from edgellm_worker import app
from edgellm_worker.config import Settings
from edgellm_worker.logs import LogFormat, configure_logs
from tests.support.daemons import TINY
from tests.support.fake_engine import LIMITS, FakeEngine
from tests.support.instant_worker import instant_worker


class _Edgellm:
    def __init__(self, kind: str) -> None:
        self.worker = (sys.executable, __file__, kind)

    async def open(self) -> None:
        self._producer = Producer(URL)
        await self._producer.call("HSET", self._producer.keys.config, "max_jobs", 10_000_000)

    async def submit(self, count: int) -> list[str]:
        jobs = await self._producer.submit_many({"prompt": f"{number}", "max_tokens": 1} for number in range(count))
        return [self._producer.keys.done(job.id) for job in jobs]

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        return server.without(jobs)

    async def close(self) -> None:
        await self._producer.close()


class QueuePeer(_Edgellm):
    settings = f"queue side alone, batches of {CONCURRENCY}"

    def __init__(self) -> None:
        super().__init__("queue")


class DaemonPeer(_Edgellm):
    settings = f"whole worker, max-batch-size {CONCURRENCY}"

    def __init__(self) -> None:
        super().__init__("daemon")


async def serve_queue() -> None:
    async with instant_worker(URL, "default", batch=CONCURRENCY):
        await asyncio.Event().wait()


async def open_instant_engine(settings: Settings) -> FakeEngine:
    return FakeEngine(dataclasses.replace(LIMITS, max_batch_size=settings.max_batch_size), at_once=True)


async def serve_daemon() -> None:
    configure_logs(LogFormat.TEXT)
    settings = Settings(model=TINY, max_batch_size=CONCURRENCY, redis_url=SecretStr(URL), metrics_port=0)
    with patch.object(app, "open_engine", open_instant_engine):
        await app.serve(settings, {})


if __name__ == "__main__":
    asyncio.run({"queue": serve_queue, "daemon": serve_daemon}[sys.argv[1]]())
