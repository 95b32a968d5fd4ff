"""saq on Redis: `enqueue` has no bulk form. A job keeps its key, so the set of incomplete jobs tells the end."""

from __future__ import annotations

from peer import CONCURRENCY, RESULT_TTL_S, URL, gather, program
from redis.asyncio import Redis
from saq.queue.redis import RedisQueue
from server import Server

queue = RedisQueue(Redis.from_url(URL))  # `Queue.from_url` knows no unix sockets


async def echo(_context: object, *, number: int) -> int:
    return number


settings = {"queue": queue, "functions": [echo], "concurrency": CONCURRENCY}


class Peer:
    settings = f"concurrency={CONCURRENCY}, hiredis"
    worker = (program("saq"), "peer_saq.settings", "--quiet")

    async def open(self) -> None:
        await queue.connect()

    async def submit(self, count: int) -> list[str]:
        return await gather(count, self._submit)

    async def _submit(self, number: int) -> str:
        job = await queue.enqueue("echo", number=number, ttl=RESULT_TTL_S)
        assert job is not None
        return str(job.id)

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        return jobs if server("ZCARD", "saq:default:incomplete") else []

    async def close(self) -> None:
        await queue.disconnect()
