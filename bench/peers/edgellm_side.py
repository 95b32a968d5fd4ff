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
from edgellm_worker.engine.api import EngineLimits, FinishReason, GenerationRequest, RowUpdate
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


class InstantEngine(FakeEngine):
    """All rows added in one turn of the loop are complete in the next, each with its prompt as its text."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._ended: list[RowUpdate] = []

    def add(self, row_id: int, request: GenerationRequest) -> None:
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._report_ended)
        tokens = request.prompt_token_ids[: request.max_new_tokens]
        self._ended.append(RowUpdate(row_id, tokens, finish_reason=FinishReason.LENGTH))

    def _report_ended(self) -> None:
        updates, self._ended = tuple(self._ended), []
        self._report(updates, len(updates))


async def open_instant_engine(settings: Settings) -> InstantEngine:
    return InstantEngine(dataclasses.replace(LIMITS, max_batch_size=settings.max_batch_size))


async def serve_daemon() -> None:
    configure_logs(LogFormat.TEXT)
    settings = Settings(model=TINY, max_batch_size=CONCURRENCY, redis_url=SecretStr(URL), metrics_port=0)
    with patch.object(app, "open_engine", open_instant_engine):
        await app.serve(settings, {})


if __name__ == "__main__":
    asyncio.run({"queue": serve_queue, "daemon": serve_daemon}[sys.argv[1]]())
