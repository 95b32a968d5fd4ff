"""What the queue costs beside the bare minimum: `python -m bench.queue_overhead [--jobs 300]`.

Both run against the same embedded server in the same process, turn by turn, with connections kept:

    bare     XADD, blocked XREADGROUP, XADD of the reply, blocked XREAD of it: one job at a time
    product  Producer.submit to the `done` entry through the daemon, an engine that returns at once, linger 0

The bound is product p50 <= 3 x bare p50. Then 400 jobs at batch 8 with streaming off, for the commands per job: what
clients sent (at most 4 per job; a script is one) and, beside it, what the server executed, commands inside scripts
included. The producer's own submit and wait are counted too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import redis.asyncio as redis_library
import structlog

from edgellm_producer.client import Producer
from edgellm_worker.batching import FormerConfig
from edgellm_worker.daemon import Daemon, DaemonConfig, DaemonParts
from edgellm_worker.embedded import EmbeddedServer
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.daemons import metrics, model
from tests.support.fake_engine import LIMITS, FakeEngine

RATIO_BOUND = 3.0
COMMANDS_BOUND = 4.0
BATCH = 8


@asynccontextmanager
async def daemon(url: str, batch: int) -> AsyncIterator[None]:
    queue = RedisQueue(QueueConfig(url=url))
    await queue.open()
    engine = FakeEngine(replace(LIMITS, max_batch_size=batch), at_once=True)
    parts = DaemonParts(queue, engine, model(), metrics(engine.limits), time.monotonic)
    worker = Daemon(parts, DaemonConfig(FormerConfig(linger_s=0.0), read_size=batch))
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await task
        await queue.close()


class Bare:
    """The fewest round trips a job can take."""

    def __init__(self, url: str) -> None:
        self._client = redis_library.from_url(url)
        self._worker = redis_library.from_url(url)
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._client.xgroup_create("bare", "g", id="0", mkstream=True)
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            reply = await self._worker.xreadgroup("g", "c", {"bare": ">"}, count=1, block=1000)
            entries = reply.get(b"bare", [[]])[0] if isinstance(reply, dict) else (reply[0][1] if reply else [])
            for _, fields in entries:
                await self._worker.xadd(fields[b"to"], {"done": b"x" * 500})

    async def job(self, n: int) -> None:
        await self._client.xadd("bare", {"to": f"bare-reply-{n}", "job": b"x" * 200})
        await self._client.xread({f"bare-reply-{n}": "0"}, block=5000)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()
        await self._worker.aclose()


async def latencies(url: str, num_jobs: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each bare job and of each of the product's, interleaved."""
    bare_ms, product_ms = [], []
    bare = Bare(url)
    await bare.open()
    async with daemon(url, BATCH), Producer(url) as producer:
        for n in range(num_jobs):
            began = time.perf_counter()
            await bare.job(n)
            between = time.perf_counter()
            job = await producer.submit("def f(", max_tokens=2)
            await job.reply(timeout=10)
            ended = time.perf_counter()
            bare_ms.append((between - began) * 1e3)
            product_ms.append((ended - between) * 1e3)
    await bare.close()
    return bare_ms[num_jobs // 10 :], product_ms[num_jobs // 10 :]


async def commands(url: str, num_jobs: int) -> tuple[float, float]:
    """Per job at batch 8: commands that clients sent, and commands that the server executed."""
    admin = redis_library.from_url(url)
    async with daemon(url, BATCH), Producer(url) as producer:
        await (await producer.submit("warm up", max_tokens=1)).reply(timeout=10)
        before = await admin.info("commandstats")
        jobs = await producer.submit_many({"prompt": f"f{n}(", "max_tokens": 2} for n in range(num_jobs))
        await asyncio.gather(*(job.reply(timeout=60) for job in jobs))
        after = await admin.info("commandstats")
    await admin.aclose()
    calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    scripts = calls.get("cmdstat_evalsha", 0) + calls.get("cmdstat_eval", 0)
    waits = calls.get("cmdstat_xread", 0)
    return (scripts + waits) / num_jobs, sum(calls.values()) / num_jobs


async def run(num_jobs: int) -> dict[str, Any]:
    with EmbeddedServer() as server:
        bare_ms, product_ms = await latencies(server.url, num_jobs)
        sent, executed = await commands(server.url, 50 * BATCH)
    bare, product = statistics.median(bare_ms), statistics.median(product_ms)
    return {
        "bare_p50_ms": round(bare, 3),
        "product_p50_ms": round(product, 3),
        "ratio": round(product / bare, 2),
        "ratio_bound": RATIO_BOUND,
        "client_commands_per_job": round(sent, 2),
        "commands_bound": COMMANDS_BOUND,
        "server_commands_per_job": round(executed, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=300)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result = asyncio.run(run(arguments.jobs))
    print(json.dumps(result))
    within = result["ratio"] <= RATIO_BOUND and result["client_commands_per_job"] <= COMMANDS_BOUND
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
