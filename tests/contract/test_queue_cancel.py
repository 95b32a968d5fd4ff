"""Jobs that end before they are done: cancelled or expired, wherever they are."""

from __future__ import annotations

import asyncio

from edgellm_producer import CancelOutcome, Status
from edgellm_worker.queue.api import BeginOutcome
from tests.support.queue_rig import NORMAL, Rig, until


async def test_cancel_of_what_waits_is_answered_by_the_cancel_itself(rig: Rig) -> None:
    worker = await rig.worker()
    released, delayed, in_lane = [await rig.submit(idempotency_key=str(i)) for i in range(3)]
    for_release, for_delay = await worker.take(2)
    await worker.release([for_release], begun=False)
    await worker.begin([for_delay])
    await worker.retry(for_delay, delay_s=60, reason="engine died")
    for job in (released, delayed, in_lane):
        assert await job.cancel() is CancelOutcome.CANCELLED
        assert (await job.reply(timeout=5)).status is Status.CANCELLED
        assert await job.cancel() is CancelOutcome.DONE
    assert await worker.take(3) == []
    assert rig.admin.zcard(rig.keys.delayed) == 0
    assert not rig.admin.exists(rig.keys.dedup("1"), rig.keys.dedup("2")), "a cancelled job frees its key"


async def test_cancel_of_what_runs_reaches_its_worker(rig: Rig) -> None:
    worker = await rig.worker()
    await until(lambda: rig.admin.pubsub_numsub(rig.keys.events)[0][1])
    job = await rig.submit()
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    assert await job.cancel() is CancelOutcome.REQUESTED
    async with asyncio.timeout(5):
        while not (cancelled := worker.cancelled()):
            await worker.wait(0.2)
    assert cancelled == {job.id}


async def test_a_lost_cancel_hint_is_found_by_the_sweep(rig: Rig) -> None:
    worker = await rig.worker()
    job = await rig.submit()
    (delivery,) = await worker.take(1)
    rig.admin.set(rig.keys.cancel(job.id), "1")
    await worker.sweep()
    assert worker.cancelled() == {job.id}
    assert await worker.begin([delivery]) == [BeginOutcome.CANCELLED]


async def test_cancelled_while_its_worker_was_dead_is_answered_at_the_next_take(rig: Rig) -> None:
    first, second = await rig.worker("w1"), await rig.worker("w2")
    job = await rig.submit()
    (delivery,) = await first.take(1)
    await first.begin([delivery])
    assert await job.cancel() is CancelOutcome.REQUESTED
    first.forget([delivery])
    rig.end_lease(delivery, "w1")
    assert await second.take(1) == []
    assert (await job.reply(timeout=5)).status is Status.CANCELLED
    assert second.counters.answered == {"cancelled": 1}


async def test_an_expired_job_is_answered_at_take(rig: Rig) -> None:
    worker = await rig.worker()
    job = await rig.submit(timeout_s=0.001, idempotency_key="k")
    await asyncio.sleep(0.01)
    assert await worker.take(1) == []
    reply = await job.reply(timeout=5)
    assert (reply.status, reply.error and reply.error.code) == (Status.EXPIRED, "timeout")
    assert rig.other_keys() == set()


async def test_an_expired_job_deep_in_the_queue_is_answered_by_the_sweep(rig: Rig) -> None:
    worker = await rig.worker()
    for _ in range(5):
        await rig.submit()
    job = await rig.submit(timeout_s=0.001)
    running = await rig.submit(timeout_s=3600.0, priority="high")
    (delivery,) = await worker.take(1)
    assert delivery.id == running.id
    rig.admin.zadd(rig.keys.prefix + "deadlines", {running.id: 1})
    await asyncio.sleep(0.01)
    await worker.sweep()
    assert (await job.reply(timeout=5)).status is Status.EXPIRED
    assert rig.answers(running.id) == 0, "what runs is its worker's to stop"
    assert (await worker.stats()).length[NORMAL] == 5
