"""Reports from other queues that concern a whole client and worker, not one transition."""

from __future__ import annotations

import asyncio

import pytest

from edgellm_producer import JobRejected, Producer
from edgellm_producer.wire import Status
from tests.support.daemons import config, running
from tests.support.fake_engine import FakeEngine
from tests.support.instant_worker import instant_worker
from tests.support.memory_queue import MemoryQueue
from tests.support.proxy import proxy_to
from tests.support.queue_rig import NORMAL, Rig, until


async def test_150_jobs_at_once_on_a_small_worker_are_all_answered(one_rig: Rig):
    """NeMo-Retriever#1551: far more jobs at once than places, none starves or is forgotten."""
    worker = await one_rig.worker()
    async with running(worker, FakeEngine(at_once=True)):
        jobs = await one_rig.producer.submit_many({"prompt": f"job {n}", "max_tokens": 2} for n in range(150))
        replies = await asyncio.gather(*(job.result(timeout=20) for job in jobs))
    assert {reply.attempt for reply in replies} == {1}
    assert one_rig.other_keys() == set()


async def test_a_drain_of_four_leases_hands_nothing_out_twice(one_rig: Rig):
    """The leases of what still runs are renewed until the last answer is written."""
    worker, second = await one_rig.worker("w1", lease_s=0.4), await one_rig.worker("w2", lease_s=0.4)
    engine = FakeEngine()
    async with running(worker, engine) as daemon:
        job = await one_rig.submit("long", max_tokens=2)
        await until(lambda: engine.rows)
        daemon.stop()
        for _ in range(16):
            assert await second.take(1) == []
            await asyncio.sleep(0.1)
        engine.step(2)
        reply = await job.result(timeout=10)
    assert (reply.worker, reply.attempt) == ("w1", 1)


async def test_the_sweep_comes_again_and_again_without_a_restart():
    """sidekiq#4937: what becomes due on a worker's second day is found as on its first."""
    queue = SweptQueue()
    async with running(queue, FakeEngine(), config(sweep_s=0.01)):
        await queue.until(lambda: queue.num_sweeps >= 5)


class SweptQueue(MemoryQueue):
    num_sweeps = 0

    async def sweep(self) -> None:
        self.num_sweeps += 1
        await super().sweep()


async def test_a_failed_poll_while_waiting_is_not_the_end_of_the_wait(default_server, queue_name):
    """taskiq#655: the connection breaks, several times, while a result is waited for; the result still comes."""
    async with (
        proxy_to(default_server.socket_path) as proxy,
        Producer(proxy.url, queue=queue_name) as producer,
    ):
        job = await producer.submit("slow")
        waiting = asyncio.create_task(job.result(timeout=60))
        for _ in range(3):
            await asyncio.sleep(0.1)
            proxy.cut()
        async with instant_worker(default_server.url, queue_name):
            assert (await waiting).text == "SLOW"


async def test_the_protocol_is_ours_whatever_the_url_says(default_server, queue_name):
    """redis-py#4052: replies come in one shape only, so that a URL's `protocol` cannot change what a batch is."""
    for protocol in (2, 3):
        url = f"{default_server.url}?protocol={protocol}"
        async with instant_worker(url, queue_name), Producer(url, queue=queue_name) as producer:
            jobs = await producer.submit_many({"prompt": f"{protocol} {n}", "stream": True} for n in range(5))
            replies = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
        assert {reply.status for reply in replies} == {Status.OK}
        assert [reply.text for reply in replies] == [f"{protocol} {n}" for n in range(5)]


async def test_a_prompt_of_five_megabytes_is_refused_at_once_and_by_name(one_rig: Rig):
    """At submit, before a byte is sent. One that was written past the client: tests/contract/test_hostile_input.py."""
    with pytest.raises(JobRejected) as caught:
        await one_rig.submit("x" * 5_000_000)
    assert (caught.value.code, caught.value.field) == ("too_large", "job")
    assert not one_rig.admin.exists(one_rig.keys.lane(NORMAL))
