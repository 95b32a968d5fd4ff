"""A daemon in ten lines, for tests of the queue alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from edgellm_worker.queue.api import BeginOutcome
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.queue_rig import ok


async def eventually(call: Callable[[], object], timeout_s: float = 10.0) -> object:
    """Repeat what the daemon would repeat, until Redis takes it."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await call()  # type: ignore[misc]
            except QueueUnavailable:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def answering(worker: RedisQueue) -> AsyncIterator[None]:
    """A daemon in ten lines: takes, begins, answers, and tries again what Redis refused."""
    closing = False

    async def serve() -> None:
        while not closing:
            deliveries = await eventually(lambda: worker.take(8))
            if not deliveries:
                await worker.wait(0.1)
                continue
            outcomes = await eventually(lambda d=deliveries: worker.begin(d))  # type: ignore[misc]
            started = [d for d, o in zip(deliveries, outcomes, strict=True) if o is BeginOutcome.STARTED]  # type: ignore[call-overload]
            await eventually(lambda s=started: worker.finish([ok(d, d.job.prompt or "") for d in s]))  # type: ignore[misc]

    task = asyncio.create_task(serve())
    try:
        yield
    finally:
        closing = True
        await task
