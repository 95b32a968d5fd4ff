"""Bounds, tenants and idempotency keys: what the submit script decides."""

from __future__ import annotations

import asyncio

import pytest

from edgellm_producer import JobRejected, QueueFull, Reply, Status
from edgellm_producer.keys import Priority
from edgellm_worker.queue.api import Answer
from tests.support.queue_rig import NORMAL, Rig, ids, ok

WINDOW = 64


async def test_a_full_queue_says_so_with_length_and_limit(rig: Rig) -> None:
    """redis#9211: nothing accepted is trimmed; what runs counts until it is answered."""
    worker = await rig.worker()
    rig.admin.hset(rig.keys.config, "max_jobs", 3)
    await rig.submit()
    (running,) = await worker.take(1)
    with pytest.raises(QueueFull) as caught:
        await rig.producer.submit_many([{"prompt": "x"}] * 3)
    assert (caught.value.length, caught.value.limit, len(caught.value.accepted_ids)) == (3, 3, 2)
    assert (await worker.stats()).length[NORMAL] == 3
    await worker.finish([ok(running)])
    await rig.submit()


async def test_a_bulk_submit_that_meets_a_wrong_job_says_what_is_in(rig: Rig) -> None:
    """One chunk is all or nothing as to wrong fields; the chunks before it are in."""
    bodies: list[dict[str, object]] = [{"prompt": "x"} for _ in range(1200)]
    bodies[1100] = {"prompt": "x", "top_p": 9}
    with pytest.raises(JobRejected) as caught:
        await rig.producer.submit_many(bodies)
    assert caught.value.field == "top_p"
    entries = rig.admin.xrange(rig.keys.lane(NORMAL))
    assert [fields["id"] for _, fields in entries] == list(caught.value.accepted_ids)
    assert len(entries) == 1000


async def test_a_bulk_submit_with_a_conflict_says_all_that_is_in(rig: Rig) -> None:
    await rig.submit("one", idempotency_key="key")
    bodies = [{"prompt": "a"}, {"prompt": "two", "idempotency_key": "key"}, {"prompt": "b"}]
    with pytest.raises(JobRejected) as caught:
        await rig.producer.submit_many(bodies)
    assert len(caught.value.accepted_ids) == 2
    assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 3


async def test_a_tenant_holds_a_window_of_the_lane_and_the_rest_waits_in_order(rig: Rig) -> None:
    worker = await rig.worker()
    jobs = await rig.producer.submit_many([{"prompt": "x", "tenant": "a"} for _ in range(WINDOW + 3)])
    stats = await worker.stats()
    assert (stats.length[NORMAL], stats.held) == (WINDOW, 3)
    other = await rig.submit(tenant="b")
    taken = await worker.take(WINDOW + 9)
    assert ids(taken) == [job.id for job in jobs[:WINDOW]] + [other.id], "b waits for a window of a, not for all of a"
    await worker.finish([ok(d) for d in taken[:2]])
    assert ids(await worker.take(9)) == [job.id for job in jobs[WINDOW : WINDOW + 2]]
    assert await jobs[-1].cancel() == "cancelled"
    assert (await worker.stats()).held == 0
    await worker.finish([ok(d) for d in taken[2:]])
    assert rig.admin.hgetall(rig.keys.tenants(Priority.NORMAL)) == {"a": "2"}


async def test_tenant_a_with_1000_jobs_does_not_keep_b_waiting(rig: Rig) -> None:
    """bull#1409."""
    worker = await rig.worker()
    await rig.producer.submit_many([{"prompt": "x", "tenant": "a"} for _ in range(1000)])
    one = await rig.submit(tenant="b")
    served = 0
    while one.id not in ids(taken := await worker.take(8)):
        served += len(taken)
        await worker.finish([ok(d) for d in taken])
    assert served <= 2 * WINDOW


async def test_a_retried_job_of_a_tenant_gives_its_place_away_and_comes_back(rig: Rig) -> None:
    worker = await rig.worker()
    await rig.producer.submit_many([{"prompt": "x", "tenant": "a"} for _ in range(WINDOW + 1)])
    (delivery,) = await worker.take(1)
    await worker.retry(delivery, delay_s=0, reason="engine died")
    assert (await worker.stats()).held == 0
    await worker.sweep()
    assert (await worker.stats()).length[NORMAL] == WINDOW + 1
    taken = await worker.take(WINDOW + 9)
    await worker.finish([ok(d) for d in taken])
    assert rig.admin.hgetall(rig.keys.tenants(Priority.NORMAL)) == {}


async def test_tenant_limits_act_at_submit(rig: Rig) -> None:
    rig.admin.hset(rig.keys.config, mapping={"tenant_max_jobs": 2, "tenant_max_jobs:vip": 3})
    for tenant, limit in (("a", 2), ("vip", 3)):
        for _ in range(limit):
            await rig.submit(tenant=tenant, priority="low")
        with pytest.raises(QueueFull) as caught:
            await rig.submit(tenant=tenant)
        assert (caught.value.length, caught.value.limit) == (limit, limit)
    await rig.submit()


async def test_fifty_submitters_of_one_key_make_one_job(rig: Rig) -> None:
    jobs = await asyncio.gather(*(rig.submit("same", idempotency_key="key") for _ in range(50)))
    assert len({job.id for job in jobs}) == 1
    assert sum(not job.is_duplicate for job in jobs) == 1
    assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 1


async def test_the_same_key_with_another_body_is_rejected(rig: Rig) -> None:
    first = await rig.submit("one", idempotency_key="key")
    with pytest.raises(JobRejected, match=first.id) as caught:
        await rig.submit("two", idempotency_key="key")
    assert (caught.value.code, caught.value.field) == ("idempotency_conflict", "idempotency_key")


async def test_a_key_is_kept_after_success_and_freed_after_failure(rig: Rig) -> None:
    """arq#432."""
    worker = await rig.worker()
    good, bad = await rig.submit(idempotency_key="good"), await rig.submit(idempotency_key="bad")
    deliveries = await worker.take(2)
    failed = Answer(deliveries[1], Reply(id=bad.id, status=Status.FAILED))
    await worker.finish([ok(deliveries[0], "kept"), failed])
    again = await rig.submit(idempotency_key="good")
    assert (again.id, (await again.result(timeout=5)).text) == (good.id, "kept")
    assert 0 < rig.admin.pttl(rig.keys.dedup("good")) <= 24 * 3_600_000
    assert (await rig.submit(idempotency_key="bad")).id != bad.id


async def test_a_key_whose_job_an_outage_took_blocks_nobody(rig: Rig) -> None:
    """bullmq#4311."""
    lost = await rig.submit(idempotency_key="key")
    rig.admin.delete(rig.keys.job(lost.id), rig.keys.lane(NORMAL))
    assert (await rig.submit("other body", idempotency_key="key")).id != lost.id


async def test_a_submit_that_runs_twice_is_one_job(rig: Rig) -> None:
    """redis-py#261: the reply was lost and the client sent it again."""
    first = await rig.submit(id="job-1")
    second = await rig.submit(id="job-1")
    assert (first.is_duplicate, second.is_duplicate, second.id) == (False, True, "job-1")
    assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 1


async def test_a_pending_key_lives_at_least_a_week(rig: Rig) -> None:
    await rig.submit(idempotency_key="k", timeout_s=1.0)
    assert rig.admin.pttl(rig.keys.dedup("k")) > 6.9 * 86_400_000
