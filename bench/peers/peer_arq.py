"""arq: `enqueue_job` has no bulk form. `poll_delay` stays at its default of 0.5 s, which its round trip shows."""

from __future__ import annotations

import sys

from arq import create_pool
from arq.connections import RedisSettings
from peer import CONCURRENCY, RESULT_TTL_S, SOCKET, gather
from server import Server

SETTINGS = RedisSettings(unix_socket_path=SOCKET)


async def echo(_context: object, number: int) -> int:
    return number


class WorkerSettings:
    functions = (echo,)
    redis_settings = SETTINGS
    max_jobs = CONCURRENCY
    keep_result = RESULT_TTL_S
    log_results = False


class Peer:
    settings = f"max_jobs={CONCURRENCY}, hiredis, poll_delay as it comes"
    worker = (sys.executable, "-m", "arq", "peer_arq.WorkerSettings")

    async def open(self) -> None:
        self._pool = await create_pool(SETTINGS)

    async def submit(self, count: int) -> list[str]:
        return await gather(count, self._submit)

    async def _submit(self, number: int) -> str:
        job = await self._pool.enqueue_job("echo", number)
        assert job is not None
        return f"arq:result:{job.job_id}"

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        return server.without(jobs)

    async def close(self) -> None:
        await self._pool.aclose()
