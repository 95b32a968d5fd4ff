"""Networks that break: replies that are lost, connections that are cut, firewalls that forget; and stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from edgellm_producer import Delta, Producer, Status
from edgellm_producer.keys import GROUP
from edgellm_worker.queue.api import BeginOutcome
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.queue.scripts import NAMES, script
from tests.support.answering import answering, eventually
from tests.support.proxy import Proxy, proxy_to
from tests.support.queue_rig import NORMAL, Rig, ids, ok, until
from tests.support.redis_server import RedisServer


@pytest.fixture
async def proxy(default_server: RedisServer) -> AsyncIterator[Proxy]:
    with default_server.client() as client:
        for name in NAMES:
            client.script_load(script(name).source)  # else the reply that is lost says NOSCRIPT
    async with proxy_to(default_server.socket_path) as started:
        yield started


async def test_a_read_whose_reply_is_lost_parks_nothing(one_rig: Rig, proxy: Proxy) -> None:
    worker = await one_rig.worker(url=proxy.url)
    jobs = [await one_rig.submit() for _ in range(3)]
    kept = await worker.take(1)
    proxy.drop_next_reply(script("take").digest.encode())
    with pytest.raises(QueueUnavailable):
        await worker.take(1)
    assert one_rig.admin.xpending(one_rig.keys.lane(NORMAL), GROUP)["pending"] == 2
    assert ids(await worker.take(2)) == [jobs[1].id, jobs[2].id]
    assert ids(kept) == [jobs[0].id], "what is known is not given twice"


async def test_a_finish_whose_reply_is_lost_answers_once(one_rig: Rig, proxy: Proxy) -> None:
    worker = await one_rig.worker(url=proxy.url)
    job = await one_rig.submit()
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    proxy.drop_next_reply(script("finish").digest.encode())
    with pytest.raises(QueueUnavailable):
        await worker.finish([ok(delivery)])
    assert await worker.finish([ok(delivery)]) == [True], "the repeat is told that its answer stands"
    assert one_rig.answers(job.id) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_a_begin_and_a_release_whose_replies_are_lost_count_once(one_rig: Rig, proxy: Proxy, begun: bool) -> None:
    worker = await one_rig.worker(url=proxy.url)
    await one_rig.submit()
    (delivery,) = await worker.take(1)
    proxy.drop_next_reply(script("begin").digest.encode())
    with pytest.raises(QueueUnavailable):
        await worker.begin([delivery])
    assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
    proxy.drop_next_reply(script("release").digest.encode())
    with pytest.raises(QueueUnavailable):
        await worker.release([delivery], begun=begun)
    await worker.release([delivery], begun=begun)
    (again,) = await worker.take(1)
    assert again.attempt == (0 if begun else 1)


async def test_a_retry_whose_reply_is_lost_delays_one_job_once(one_rig: Rig, proxy: Proxy) -> None:
    worker = await one_rig.worker(url=proxy.url)
    await one_rig.submit()
    (delivery,) = await worker.take(1)
    proxy.drop_next_reply(script("retry").digest.encode())
    with pytest.raises(QueueUnavailable):
        await worker.retry(delivery, delay_s=0, reason="engine died")
    await worker.retry(delivery, delay_s=0, reason="engine died")
    await worker.sweep()
    assert len(await worker.take(9)) == 1


async def test_a_delta_whose_reply_is_lost_is_shown_once(one_rig: Rig, proxy: Proxy) -> None:
    worker = await one_rig.worker(url=proxy.url)
    job = await one_rig.submit(stream=True)
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    delta = Delta(attempt=1, offset_tokens=0, text="te", token_ids=[1])
    proxy.drop_next_reply(script("append").digest.encode())
    with pytest.raises(QueueUnavailable):
        await worker.append(delivery, delta)
    await worker.append(delivery, delta)
    await worker.finish([ok(delivery, "text")])
    assert [event.text async for event in job.stream()] == ["te", "xt"]


async def test_cuts_while_jobs_run_cost_no_job(one_rig: Rig, proxy: Proxy) -> None:
    """celery#8030, bullmq#4479: again and again, also during the blocked read; every pooled socket is dead after each."""
    worker = await one_rig.worker(url=proxy.url, lease_s=1.0)
    async with answering(worker), Producer(proxy.url, queue=one_rig.keys.queue) as producer:
        waits = []
        for number in range(60):
            waits.append(asyncio.create_task((await producer.submit(f"p{number}")).result(timeout=30)))
            if number % 6 == 0:
                proxy.cut()
            await asyncio.sleep(0.01)
        texts = [reply.text for reply in await asyncio.gather(*waits)]
    assert texts == [f"p{number}" for number in range(60)]
    assert worker.counters.num_reconnects >= 1
    assert one_rig.other_keys() == set()


async def test_a_silent_firewall_is_noticed_and_survived(one_rig: Rig, proxy: Proxy) -> None:
    """bunqueue#94: the connection is there, nothing comes through."""
    worker = await one_rig.worker(url=proxy.url, command_timeout_s=0.3)
    proxy.swallow = True
    with pytest.raises(QueueUnavailable, match="Timeout"):
        await worker.sweep()
    proxy.swallow = False
    await one_rig.submit()
    assert len(await eventually(lambda: worker.take(1))) == 1  # type: ignore[arg-type]


async def test_the_blocked_read_notices_a_dead_connection_within_five_seconds(one_rig: Rig, proxy: Proxy) -> None:
    worker = await one_rig.worker(url=proxy.url, block_ms=1000)
    await worker.take(1)
    started = time.monotonic()
    proxy.swallow = True
    await worker._waiter.reading(["0-0"] * 3)
    assert time.monotonic() - started < 5
    proxy.swallow = False


async def test_a_reset_during_the_blocked_read_costs_a_wake_up(one_rig: Rig, proxy: Proxy) -> None:
    """bullmq#4479."""
    worker = await one_rig.worker(url=proxy.url, block_ms=5000)
    await worker.take(1)
    reading = worker._waiter.reading(["0-0"] * 3)
    await until(lambda: any(client["cmd"] == "xread" for client in one_rig.admin.client_list()))
    proxy.cut()
    async with asyncio.timeout(4):
        await reading
    await one_rig.submit()
    assert len(await eventually(lambda: worker.take(1))) == 1  # type: ignore[arg-type]


async def test_a_block_longer_than_the_urls_socket_timeout_is_waited_out(
    one_rig: Rig, default_server: RedisServer
) -> None:
    """docket#425: the timeout is made of the block, whatever the URL or the library's default says."""
    worker = await one_rig.worker(url=f"{default_server.url}?socket_timeout=0.1", block_ms=600, lease_s=60.0)
    await worker.take(1)
    asked_at = time.monotonic()
    await worker._waiter.reading(["0-0"] * 3)
    assert worker.last_reply_age_s < (time.monotonic() - asked_at) / 2, "it ended with Redis's answer"


async def test_a_blocked_event_loop_loses_no_lease(one_rig: Rig) -> None:
    """bullmq#3056: two leases long."""
    first, second = await one_rig.worker("w1", lease_s=0.4), await one_rig.worker("w2", lease_s=0.4)
    await one_rig.submit()
    (delivery,) = await first.take(1)
    time.sleep(0.9)  # noqa: ASYNC251 - the block is the point
    assert await second.take(1) == []
    assert first.lost() == set()
    assert await first.begin([delivery]) == [BeginOutcome.STARTED]


async def test_five_leases_on_a_healthy_worker_beside_idle_ones_start_once(one_rig: Rig) -> None:
    """docket#250, celery#5935: however long a job waits or runs."""
    workers = [await one_rig.worker(f"w{i}", lease_s=0.3) for i in range(4)]
    await one_rig.submit()
    (delivery,) = await workers[0].take(1)
    async with asyncio.timeout(10):
        for _ in range(30):
            assert [await worker.take(1) for worker in workers[1:]] == [[]] * 3
            await asyncio.sleep(0.05)
    assert await workers[0].begin([delivery]) == [BeginOutcome.STARTED]


async def test_a_worker_that_stops_at_the_instant_a_job_comes_leaves_it(one_rig: Rig) -> None:
    """celery#4354: the wake-up takes nothing."""
    first = await one_rig.worker("w1")
    await first.take(1)
    waiting = asyncio.create_task(first.wait(5))
    await asyncio.sleep(0.01)
    job = await one_rig.submit()
    await first.close()
    await waiting
    second = await one_rig.worker("w2")
    (delivery,) = await second.take(1)
    assert (delivery.id, delivery.attempt) == (job.id, 0)


async def test_200_finishes_at_once_wait_for_connections(one_rig: Rig) -> None:
    """redis-py#2517: more calls than connections."""
    worker = await one_rig.worker()
    jobs = await one_rig.producer.submit_many([{"prompt": str(i)} for i in range(200)])
    deliveries = await worker.take(200)
    await worker.begin(deliveries)
    done = await asyncio.gather(*(worker.finish([ok(d, d.job.prompt or "")]) for d in deliveries))
    assert done == [[True]] * 200
    assert sum(client["cmd"] == "evalsha" for client in one_rig.admin.client_list()) <= 25
    assert [(await job.result(timeout=5)).text for job in jobs] == [str(i) for i in range(200)]


async def test_a_reply_key_of_a_stranger_stops_no_batch(rig: Rig) -> None:
    worker = await rig.worker()
    jobs = [await rig.submit() for _ in range(3)]
    deliveries = await worker.take(3)
    await worker.begin(deliveries)
    rig.admin.set(rig.keys.reply(jobs[1].id), "squatter")
    assert await worker.finish([ok(d) for d in deliveries]) == [True] * 3
    assert [rig.answers(job.id) for job in jobs] == [1, 1, 1]


async def test_a_worker_clock_five_minutes_off_changes_nothing(one_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await one_rig.submit(timeout_s=60.0)
    true_time, true_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: true_time() + 300)
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + 300 * 10**9)
    worker = await one_rig.worker()
    (delivery,) = await worker.take(1)
    assert delivery.deadline_ms == delivery.enqueued_at_ms + 60_000
    assert delivery.taken_at_ms < delivery.deadline_ms
    await worker.finish([ok(delivery)])
    assert (await job.result(timeout=5)).status is Status.OK


async def test_a_group_that_vanishes_again_and_again_makes_no_spin(rig: Rig) -> None:
    """jac#7452."""
    worker = await rig.worker()
    for _ in range(5):
        job = await rig.submit()
        rig.admin.xgroup_destroy(rig.keys.lane(NORMAL), GROUP)
        (delivery,) = await worker.take(1)
        assert delivery.id == job.id
        await worker.finish([ok(delivery)])
        rig.admin.xgroup_destroy(rig.keys.lane(NORMAL), GROUP)
        rig.admin.config_resetstat()
        ends_at = time.monotonic() + 0.3
        while time.monotonic() < ends_at:
            await worker.take(1)
            await worker.wait(0.1)
        calls = rig.admin.info("commandstats")
        assert calls.get("cmdstat_xread", {"calls": 0})["calls"] <= 10, "each blocks for 200 ms"


async def test_health_is_any_reply(one_rig: Rig) -> None:
    """A worker whose slots are full does not read; its renewals say that Redis answers."""
    worker = await one_rig.worker(lease_s=0.3)
    started = time.monotonic()
    await until(lambda: time.monotonic() - started > 0.5 and worker.last_reply_age_s < 0.2)
    assert worker.counters.renewal_age_s < 0.3
