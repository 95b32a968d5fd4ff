"""One queue on one server: a producer, any number of workers, and a look behind the curtain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from edgellm_producer import Producer, Reply, Status, SubmittedJob
from edgellm_producer.keys import GROUP, Keys, Priority
from edgellm_worker.queue.api import Answer, Delivery
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.redis_server import RedisServer

T = TypeVar("T")


class Rig:
    def __init__(self, server: RedisServer, url: str, queue: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.keys = Keys(queue)
        self.admin = stack.enter_context(server.client())
        self.raw = stack.enter_context(server.client(is_raw=True))
        self._stack = stack
        self.producer = Producer(url, queue=queue)

    async def worker(self, name: str = "w1", **settings: Any) -> RedisQueue:
        settings = {"url": self.url, "lease_s": 60.0, "reclaim_interval_s": 0.0, "block_ms": 200, **settings}
        queue = RedisQueue(QueueConfig(queue=self.keys.queue, consumer=name, **settings))
        self._stack.push_async_callback(queue.close)
        await queue.open()
        return queue

    async def submit(self, prompt: str = "hi", **fields: Any) -> SubmittedJob:
        return await self.producer.submit(prompt, **fields)

    def end_lease(self, delivery: Delivery, holder: str) -> None:
        """As if the holder had been silent for an hour."""
        lane = self.keys.lane(delivery.priority)
        self.admin.xclaim(lane, GROUP, holder, 0, [delivery.entry_id], idle=3_600_000, justid=True)

    def make_older(self, job_id: str, seconds: float) -> None:
        """As if the job had been submitted earlier."""
        key = self.keys.job(job_id)
        self.admin.hset(key, "time", int(self.admin.hget(key, "time") or 0) - round(seconds * 1000))

    def answers(self, job_id: str) -> int:
        """How many `done` entries the reply has: one, or something is broken."""
        return sum("done" in fields for _, fields in self.raw_reply(job_id))

    def raw_reply(self, job_id: str) -> list[tuple[str, dict[str, Any]]]:
        return [
            (entry.decode(), {k.decode(): v for k, v in fields.items()})
            for entry, fields in self.raw.xrange(self.keys.reply(job_id))
        ]

    def other_keys(self) -> set[str]:
        """Everything that is left of the queue, less what is documented to stay."""
        left = set(self.admin.scan_iter(self.keys.prefix + "*", count=1000))
        stays = {*self.keys.lanes, self.keys.dead, self.keys.config, self.keys.lease}
        return {
            k
            for k in left - stays
            if not k.startswith(tuple(self.keys.prefix + w for w in ("done:", "reply:", "worker:")))
        }


async def until(find: Callable[[], T], timeout_s: float = 10.0) -> T:
    """What `find` returns as soon as it is truthy."""
    async with asyncio.timeout(timeout_s):
        while not (found := find()):
            await asyncio.sleep(0.01)
    return found


async def renewed(worker: RedisQueue) -> None:
    """The lease keeper's thread, on its own connection, has had a renewal confirmed that began after this call."""
    asked_at = time.monotonic()
    await until(lambda: worker._keeper.renewal_age_s < time.monotonic() - asked_at)


def ok(delivery: Delivery, text: str = "text") -> Answer:
    reply = Reply(id=delivery.id, status=Status.OK, text=text, token_ids=[1, 2], attempt=delivery.attempt + 1)
    return Answer(delivery, reply)


def ids(deliveries: list[Delivery]) -> list[str]:
    return [delivery.id for delivery in deliveries]


@asynccontextmanager
async def open_rig(server: RedisServer, queue: str, *, url: str | None = None) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(server, url or server.url, queue, stack)
        stack.push_async_callback(rig.producer.close)
        yield rig


LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH
