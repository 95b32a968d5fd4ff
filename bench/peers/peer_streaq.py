"""streaq: `enqueue_many` is one pipeline."""

from __future__ import annotations

from contextlib import AsyncExitStack

from peer import CONCURRENCY, RESULT_TTL_S, URL, program
from server import Server
from streaq import Worker

worker = Worker(redis_url=URL, concurrency=CONCURRENCY, anyio_kwargs={"use_uvloop": True})


@worker.task(ttl=RESULT_TTL_S, silent=True)
async def echo(number: int) -> int:
    return number


class Peer:
    settings = f"concurrency={CONCURRENCY}, uvloop, enqueue_many"
    worker = (program("streaq"), "run", "peer_streaq:worker")

    async def open(self) -> None:
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(worker)

    async def submit(self, count: int) -> list[str]:
        tasks = [echo.enqueue(number) for number in range(count)]
        await worker.enqueue_many(tasks)
        return [worker.results_key + task.id for task in tasks]

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        return server.without(jobs)

    async def close(self) -> None:
        await self._stack.aclose()
