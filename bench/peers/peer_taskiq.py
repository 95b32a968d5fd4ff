"""taskiq with taskiq-redis's stream broker, the one that acknowledges: `kiq` has no bulk form."""

from __future__ import annotations

from peer import CONCURRENCY, RESULT_TTL_S, URL, gather, program
from server import Server
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

broker = RedisStreamBroker(URL, consumer_id="0").with_result_backend(
    RedisAsyncResultBackend(URL, result_ex_time=RESULT_TTL_S)
)


@broker.task(task_name="echo")
async def echo(number: int) -> int:
    return number


class Peer:
    settings = f"RedisStreamBroker, max-async-tasks={CONCURRENCY}, uvloop, hiredis"
    worker = (program("taskiq"), "worker", "peer_taskiq:broker", "--workers", "1", "--log-level", "WARNING")
    worker += ("--max-async-tasks", str(CONCURRENCY), "--max-prefetch", str(CONCURRENCY))

    async def open(self) -> None:
        await broker.startup()

    async def submit(self, count: int) -> list[str]:
        return await gather(count, self._submit)

    async def _submit(self, number: int) -> str:
        return str((await echo.kiq(number)).task_id)

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        return server.without(jobs)

    async def close(self) -> None:
        await broker.shutdown()
