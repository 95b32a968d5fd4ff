"""This product, behind two engines that answer at once.

`queue`: the worker's queue side, with an answer made beside it. `daemon`: the whole worker process (reader, tokenizer,
batches, streaming, outbox, metrics, a log line per job), with an engine whose rows are complete after one step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time

import structlog
from peer import CONCURRENCY, URL
from server import Server

from edgellm_producer import Producer
from edgellm_worker.daemon import Daemon, DaemonParts
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support import daemons
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


async def serve_daemon() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    engine = FakeEngine(dataclasses.replace(LIMITS, max_batch_size=CONCURRENCY), at_once=True)
    queue = RedisQueue(QueueConfig(url=URL, queue="default"))
    await queue.open()
    parts = DaemonParts(queue, engine, daemons.model(), daemons.metrics(engine.limits), time.monotonic)
    await Daemon(parts, daemons.config(read_size=CONCURRENCY, sweep_s=1.0)).run()


if __name__ == "__main__":
    asyncio.run({"queue": serve_queue, "daemon": serve_daemon}[sys.argv[1]]())
