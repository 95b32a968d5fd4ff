"""What an operator's hand takes out of the queue: jobs are answered once all the same, and nothing is left behind.

redis#10756 and langfuse#15509: XDEL, XTRIM, XACK, XGROUP and flushes meet jobs that wait, that run, that are handed back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from edgellm_producer import Delta, Status, SubmittedJob
from edgellm_producer.dead import DeadLetters
from edgellm_producer.errors import ProtocolError
from edgellm_producer.keys import GROUP
from edgellm_worker.queue.api import BeginOutcome, Delivery
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.queue_rig import NORMAL, Rig, ids, ok, renewed, until

Hand = Callable[[Rig, Delivery], object]


def delete_entry(rig: Rig, delivery: Delivery) -> None:
    assert rig.admin.xdel(rig.keys.lane(NORMAL), delivery.entry_id)


def trim_all(rig: Rig, _: Delivery) -> None:
    rig.admin.xtrim(rig.keys.lane(NORMAL), maxlen=0, approximate=False)


def delete_lane(rig: Rig, _: Delivery) -> None:
    rig.admin.delete(rig.keys.lane(NORMAL))


def delete_all(rig: Rig, _: Delivery) -> None:
    rig.admin.delete(*rig.admin.scan_iter(rig.keys.prefix + "*"))


def acknowledge(rig: Rig, delivery: Delivery) -> None:
    rig.admin.xack(rig.keys.lane(NORMAL), GROUP, delivery.entry_id)


def remove_consumer(rig: Rig, _: Delivery) -> None:
    rig.admin.xgroup_delconsumer(rig.keys.lane(NORMAL), GROUP, "w1")


def group_at_the_end(rig: Rig, _: Delivery) -> None:
    rig.admin.xgroup_destroy(rig.keys.lane(NORMAL), GROUP)
    rig.admin.xgroup_create(rig.keys.lane(NORMAL), GROUP, "$")


HANDS: tuple[Hand, ...] = (
    delete_entry,
    trim_all,
    delete_lane,
    delete_all,
    acknowledge,
    remove_consumer,
    group_at_the_end,
)
KEEPS_THE_ENTRY = (acknowledge, remove_consumer, group_at_the_end)


async def running(rig: Rig, **settings: object) -> tuple[RedisQueue, SubmittedJob, Delivery]:
    worker = await rig.worker(lease_s=0.3, block_ms=20, **settings)
    job = await rig.submit("hello", stream=True, tenant="t")
    (delivery,) = await worker.take(1)
    assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
    return worker, job, delivery


def make_check_due(rig: Rig, job_id: str) -> None:
    """As if the job had become old enough to be looked at."""
    assert rig.admin.zadd(rig.keys.checks, {job_id: 1}, xx=True, ch=True)


@pytest.mark.parametrize("hand", HANDS)
async def test_a_job_in_hand_whose_entry_is_deleted_is_answered_once(rig: Rig, hand: Hand) -> None:
    worker, job, delivery = await running(rig)
    hand(rig, delivery)
    for _ in range(3):
        await renewed(worker)
    assert worker.lost() == set(), "nobody else can have it"
    assert await worker.append(delivery, Delta(attempt=1, offset_tokens=0, text="te", token_ids=[1]))
    assert await worker.finish([ok(delivery)]) == [True]
    assert rig.answers(job.id) == 1
    assert (await job.result(timeout=5)).text == "text"
    await worker.sweep()
    assert await worker.take(9) == []
    assert rig.other_keys() == set()


@pytest.mark.parametrize("hand", HANDS)
async def test_a_job_in_hand_that_had_not_begun_can_begin(one_rig: Rig, hand: Hand) -> None:
    rig = one_rig
    worker = await rig.worker(lease_s=0.3, block_ms=20)
    await rig.submit()
    (delivery,) = await worker.take(1)
    hand(rig, delivery)
    await renewed(worker)
    await renewed(worker)
    assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
    assert await worker.finish([ok(delivery)]) == [True]
    assert rig.other_keys() == set()


@pytest.mark.parametrize("hand", [delete_entry, delete_all, acknowledge])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_job_whose_entry_is_deleted_is_handed_back_whole(rig: Rig, hand: Hand, begun: bool) -> None:
    worker, job, delivery = await running(rig)
    second = await rig.worker("w2", block_ms=20)
    hand(rig, delivery)
    await renewed(worker)
    await worker.release([delivery], begun=begun)
    await second.sweep()
    (again,) = await second.take(9)
    counted = 0 if begun or hand is delete_all else 1
    assert (again.id, again.job.prompt, again.attempt) == (job.id, "hello", counted)
    await worker.release([delivery], begun=begun)
    assert await worker.begin([delivery]) == [BeginOutcome.LOST]
    assert await second.begin([again]) == [BeginOutcome.STARTED]
    assert await second.finish([ok(again)]) == [True]
    assert rig.other_keys() == set()


@pytest.mark.parametrize("hand", [delete_entry, delete_all])
async def test_a_job_whose_entry_is_deleted_is_tried_again_once(rig: Rig, hand: Hand) -> None:
    worker, job, delivery = await running(rig)
    hand(rig, delivery)
    for _ in range(2):
        await worker.retry(delivery, delay_s=0, reason="the engine died, and the first reply was lost")
    await worker.sweep()
    (again,) = await worker.take(9)
    counted = 0 if hand is delete_all else 1
    assert (again.id, again.job.prompt, again.attempt, again.runs_alone) == (job.id, "hello", counted, True)


async def test_what_two_workers_have_in_hand_goes_to_the_first_that_begins(rig: Rig) -> None:
    first, second = await rig.worker("w1"), await rig.worker("w2", block_ms=20)
    await rig.submit()
    (delivery,) = await first.take(1)
    rig.end_lease(delivery, "w1")
    (again,) = await second.take(1)
    trim_all(rig, delivery)
    acknowledge(rig, delivery)
    assert await first.begin([delivery]) == [BeginOutcome.STARTED]
    assert await second.begin([again]) == [BeginOutcome.LOST]


async def test_a_job_deleted_before_any_worker_had_it_is_answered_by_the_sweep(rig: Rig) -> None:
    worker = await rig.worker(block_ms=20)
    jobs = [await rig.submit(tenant="t", idempotency_key=str(n)) for n in range(3)]
    rig.admin.xtrim(rig.keys.lane(NORMAL), maxlen=0, approximate=False)
    await worker.sweep()
    assert [rig.answers(job.id) for job in jobs] == [0, 0, 0], "a job is not looked at while it is young"
    for job in jobs:
        make_check_due(rig, job.id)
    await worker.sweep()
    await worker.sweep()
    for job in jobs:
        reply = await job.reply(timeout=5)
        assert (reply.status, reply.error and reply.error.code) == (Status.FAILED, "entry_deleted")
        assert rig.answers(job.id) == 1
    assert worker.counters.answered == {"entry_deleted": 3}
    letters = [fields for _, fields in rig.admin.xrange(rig.keys.dead)]
    assert {letter["id"]: letter["reason"] for letter in letters} == {job.id: "entry_deleted" for job in jobs}
    assert len(letters) == 3
    ((entry, _), *_) = rig.admin.xrange(rig.keys.dead)
    with pytest.raises(ProtocolError, match="went with its entry, which somebody deleted"):
        await DeadLetters(rig.producer).retry(entry)
    assert rig.other_keys() == set(), "its key and its tenant's place are free again"


async def test_a_job_whose_worker_died_after_its_entry_was_deleted_is_answered_by_the_sweep(rig: Rig) -> None:
    worker, job, delivery = await running(rig)
    second = await rig.worker("w2", block_ms=20)
    delete_entry(rig, delivery)
    await renewed(worker)
    make_check_due(rig, job.id)
    await second.sweep()
    assert rig.answers(job.id) == 0, "its worker lives and has it in hand"
    await worker.close()
    rig.admin.delete(rig.keys.worker("w1"))
    make_check_due(rig, job.id)
    await second.sweep()
    reply = await job.reply(timeout=5)
    assert reply.error is not None
    assert (reply.error.code, reply.attempt) == ("entry_deleted", 1)
    assert rig.other_keys() == set()


@pytest.mark.parametrize("hand", KEEPS_THE_ENTRY)
async def test_what_was_taken_from_its_dead_worker_by_hand_is_delivered_again(rig: Rig, hand: Hand) -> None:
    worker, job, delivery = await running(rig)
    second = await rig.worker("w2", block_ms=20)
    worker.forget([delivery])
    hand(rig, delivery)
    assert await second.take(9) == [], "no list and no read leads to it"
    make_check_due(rig, job.id)
    await second.sweep()
    assert ids(await second.take(9)) == [job.id]


async def test_waiting_and_delayed_jobs_that_are_in_their_place_are_left_alone(rig: Rig) -> None:
    worker = await rig.worker(block_ms=20)
    jobs = [await rig.submit(tenant="t") for _ in range(67)]
    (delivery,) = await worker.take(1)
    await worker.retry(delivery, delay_s=60, reason="engine died")
    before = await worker.stats()
    for job in jobs:
        make_check_due(rig, job.id)
    await worker.sweep()
    assert dataclasses.replace(await worker.stats(), oldest_s=before.oldest_s) == before
    due_ms = [score for _, score in rig.admin.zrange(rig.keys.checks, 0, -1, withscores=True)]
    assert len(due_ms) == 67
    assert min(due_ms) > delivery.enqueued_at_ms + 59_000
    assert worker.counters.answered == {}


async def test_held_jobs_whose_list_or_counts_are_deleted_enter_the_lane(rig: Rig) -> None:
    worker = await rig.worker(block_ms=20)
    jobs = [await rig.submit(tenant="t") for _ in range(66)]
    assert (await worker.stats()).held == 2
    rig.admin.delete(rig.keys.held(NORMAL, "t"))
    for job in jobs:
        make_check_due(rig, job.id)
    await worker.sweep()
    assert (await worker.stats()).held == 0
    deliveries = await worker.take(99)
    assert sorted(ids(deliveries)) == sorted(job.id for job in jobs)
    await worker.finish([ok(d) for d in deliveries])
    assert rig.other_keys() == set()


async def test_a_delayed_job_that_is_deleted_is_answered(rig: Rig) -> None:
    worker, job, delivery = await running(rig)
    await worker.retry(delivery, delay_s=60, reason="engine died")
    rig.admin.delete(rig.keys.delayed)
    make_check_due(rig, job.id)
    await worker.sweep()
    assert (await job.reply(timeout=5)).error is not None
    assert rig.other_keys() == set()


async def test_a_flushed_queue_works_on_beside_what_runs(rig: Rig) -> None:
    worker, job, delivery = await running(rig)
    delete_all(rig, delivery)
    after_job = await rig.submit("after")
    (after,) = await worker.take(9)
    assert after.id == after_job.id
    assert await until(lambda: worker.counters.renewal_age_s < 0.3)
    assert await worker.finish([ok(after, "after"), ok(delivery)]) == [True, True]
    assert [(await j.result(timeout=5)).text for j in (job, after_job)] == ["text", "after"]
    assert rig.other_keys() == set()
