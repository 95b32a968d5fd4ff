"""The whole worker around an engine process that goes wrong: every job is answered, the worker is ready again, and the
counters say what happened.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgellm_producer import Status
from edgellm_worker.daemon import Daemon, DaemonParts
from edgellm_worker.engine.child.handle import ChildEngineHandle, ChildOptions
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.watchdog import WatchdogLimits
from edgellm_worker.engine.runtime.rules import SpeculativeRules
from edgellm_worker.health import WorkerState, state_of
from edgellm_worker.metrics import Metrics
from tests.support.child_engines import TRIGGER
from tests.support.daemons import config, metrics, model
from tests.support.queue_rig import Rig, open_rig, until
from tests.support.redis_server import RedisServer

SCRIPT = Path(__file__).parents[1] / "support" / "child_engines.py"
TOKENS = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture
async def rig(default_server: RedisServer, queue_name: str) -> AsyncIterator[Rig]:
    async with open_rig(default_server, queue_name) as opened:
        yield opened


class Worker:
    def __init__(self, daemon: Daemon, engine: ChildEngineHandle, counted: Metrics) -> None:
        self.daemon, self.engine, self._counted = daemon, engine, counted

    @property
    def is_ready(self) -> bool:
        return state_of(self.daemon.snapshot()) is WorkerState.READY

    def value(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.daemon.render().decode())
        samples = [s for family in families for s in family.samples if s.name == f"edgellm_{name}"]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


@asynccontextmanager
async def worker_with(rig: Rig, mode: str, *, soft_rss_bytes: int | None = None) -> AsyncIterator[Worker]:
    options = ChildOptions(
        load=Load("counting", ""),
        rules=SpeculativeRules,
        command=(sys.executable, str(SCRIPT), mode),
        watchdog=WatchdogLimits(load_s=30, progress_s=0.8 if mode == "hang" else 20.0, prefill_s_per_1000_tokens=0),
        backoff_s=(0.05,),
        soft_rss_bytes=soft_rss_bytes,
    )
    engine = await ChildEngineHandle.start(options)
    counted = metrics(engine.limits)
    queue = await rig.worker("w1", lease_s=2.0)
    settings = config(read_size=4, block_s=0.2, sweep_s=0.1)
    daemon = Daemon(DaemonParts(queue, engine, model(), counted, time.monotonic), settings)
    task = asyncio.create_task(daemon.run())
    try:
        yield Worker(daemon, engine, counted)
    finally:
        daemon.stop()
        daemon.stop()
        await task
        await engine.close()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("mode", "is_hang"),
    [
        ("hang", True),
        ("segfault", False),
        ("exit0", False),
        ("garbage", False),
        ("oom", False),
        ("memory", False),
    ],
)
async def test_a_job_that_breaks_the_engine_is_given_up_and_all_others_are_answered(
    rig: Rig, mode: str, is_hang: bool
) -> None:
    """MemOS#2403, with real processes: one poison job among eight good ones that share its batches."""
    async with worker_with(rig, mode) as worker:
        good = [await rig.producer.submit(prompt_token_ids=[10 + n], **TOKENS) for n in range(4)]
        poison = await rig.producer.submit(prompt_token_ids=[TRIGGER], **TOKENS)
        good += [await rig.producer.submit(prompt_token_ids=[20 + n], **TOKENS) for n in range(4)]
        replies = await asyncio.gather(*(job.reply(timeout=60) for job in good))
        assert [reply.status for reply in replies] == [Status.OK] * 8
        assert [reply.token_ids for reply in replies] == [
            [first + n + 1 for n in range(3)] for first in (10, 11, 12, 13, 20, 21, 22, 23)
        ]
        reply = await poison.reply(timeout=60)
        assert (reply.status, reply.error and reply.error.code) == (Status.FAILED, "poison")
        await until(lambda: worker.is_ready)
        after = await rig.producer.submit(prompt_token_ids=[30], **TOKENS)
        assert (await after.result(timeout=20)).token_ids == [31, 32, 33]
        deaths = worker.value("engine_restarts_total")
        assert deaths in {2, 3}, "in company if it had any, then twice alone"
        assert worker.value("engine_hangs_total") == (deaths if is_hang else 0)
        reason = "engine_hang" if is_hang else "engine_failure"
        assert worker.value("job_retries_total", reason=reason) == worker.value("job_retries_total") >= deaths
        await until(lambda: worker.value("request_success_total") == 9)
        assert worker.value("request_failure_total", code="poison") == worker.value("request_failure_total") == 1
        assert [fields["reason"] for _, fields in rig.admin.xrange(rig.keys.dead)] == ["poison"]
    assert all(rig.answers(job.id) == 1 for job in (*good, poison, after))
    assert rig.other_keys() == set()


@pytest.mark.timeout(60)
async def test_an_engine_that_leaks_is_replaced_between_jobs(rig: Rig) -> None:
    async with worker_with(rig, "leak") as worker:
        base = worker.engine.rss_bytes()
    async with worker_with(rig, "leak", soft_rss_bytes=base + (100 << 20)) as worker:
        first = worker.engine.pid
        jobs = [await rig.producer.submit(prompt_token_ids=[TRIGGER], **TOKENS) for _ in range(6)]
        replies = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
        assert {reply.attempt for reply in replies} == {1}, "no job pays for it"
        await until(lambda: worker.is_ready and worker.engine.pid != first)
        assert worker.value("engine_restarts_total") >= 1
        assert worker.value("job_retries_total") == worker.value("engine_hangs_total") == 0
        await until(lambda: worker.value("request_success_total") == 6)
    assert rig.other_keys() == set()


@pytest.mark.timeout(60)
async def test_a_job_whose_engine_ignores_its_cancellation_is_answered_and_stops_nobody(rig: Rig) -> None:
    """asynq#420: the engine hangs in a step and hears nothing; it has no other row that would tell."""
    async with worker_with(rig, "hang") as worker:
        deaf = await rig.producer.submit(prompt_token_ids=[TRIGGER], **TOKENS)
        await until(lambda: worker.value("num_requests_running") == 1)
        assert await deaf.cancel() == "requested"
        assert (await deaf.reply(timeout=10)).status is Status.CANCELLED
        others = [await rig.producer.submit(prompt_token_ids=[40 + n], **TOKENS) for n in range(6)]
        replies = await asyncio.gather(*(job.result(timeout=30) for job in others))
        assert [reply.token_ids[0] for reply in replies] == [41 + n for n in range(6)]
        await until(lambda: worker.is_ready)
    assert rig.answers(deaf.id) == 1
    assert rig.other_keys() == set()
