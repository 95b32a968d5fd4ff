"""A worker whose engine answers at once: the queue's real worker side, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from edgellm_producer.wire import Delta, FinishReason, Reply, Status, Usage
from edgellm_worker.queue.api import Answer, BeginOutcome, Delivery
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.redis_queue import RedisQueue


def echo(delivery: Delivery) -> Reply:
    """The prompt, or the last message, in capitals."""
    job = delivery.job
    text = job.prompt or (str(job.messages[-1]["content"]) if job.messages else "")
    return Reply(
        id=job.id,
        status=Status.OK,
        text=text.upper(),
        token_ids=[1, 2],
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3),
        attempt=1,
    )


async def _stream(queue: RedisQueue, delivery: Delivery, reply: Reply) -> None:
    half = len(reply.text) // 2
    for offset, text in enumerate((reply.text[:half], reply.text[half:])):
        await queue.append(delivery, Delta(attempt=1, offset_tokens=offset, text=text, token_ids=[offset + 1]))


async def serve(queue: RedisQueue, answer: Callable[[Delivery], Reply | None], batch: int) -> None:
    """Answers are published batch by batch, beside the taking of the next one, as the daemon does; a None leaves the job
    unanswered and its lease held.
    """
    publishing: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    publishing.set_result(None)
    while True:
        deliveries = await queue.take(batch)
        if not deliveries:
            await queue.wait(1.0)
            continue
        outcomes = await queue.begin(deliveries)
        answers = []
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            reply = answer(delivery) if outcome is BeginOutcome.STARTED else None
            if reply is not None:
                if delivery.job.stream:
                    await _stream(queue, delivery, reply)
                answers.append(Answer(delivery, reply))
        await publishing
        publishing = asyncio.ensure_future(queue.finish(answers))


@asynccontextmanager
async def instant_worker(
    url: str, queue_name: str, answer: Callable[[Delivery], Reply | None] = echo, *, batch: int = 64
) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(QueueConfig(url=url, queue=queue_name))
    await queue.open()
    task = asyncio.create_task(serve(queue, answer, batch))
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await queue.close()
