"""The transitions of a job, one by one, on every version of the server."""

from __future__ import annotations

import asyncio

import pytest

from edgellm_producer import Delta, JobState, Reply, Status
from edgellm_producer.keys import GROUP
from edgellm_producer.wire import encode
from edgellm_worker.queue.api import Answer, BeginOutcome
from edgellm_worker.queue.errors import ModelMismatch, QueueUnavailable
from tests.support.queue_rig import HIGH, LOW, NORMAL, Rig, ids, ok


async def test_a_job_runs_once_and_leaves_only_its_answer(rig: Rig) -> None:
    worker = await rig.worker()
    job = await rig.submit("hello", max_tokens=3, timeout_s=60.0, idempotency_key="k", tenant="t")
    (delivery,) = await worker.take(4)
    assert delivery.job.prompt == "hello"
    assert delivery.attempt == 0
    assert delivery.deadline_ms == delivery.enqueued_at_ms + 60_000
    assert delivery.taken_at_ms >= delivery.enqueued_at_ms
    assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
    assert (await job.status()).state is JobState.RUNNING
    assert await worker.finish([ok(delivery)]) == [True]
    reply = await job.result(timeout=5)
    assert (reply.text, reply.worker, reply.reply_ttl_s) == ("text", "w1", 3600)
    assert rig.answers(job.id) == 1
    assert all(rig.admin.xlen(lane) == 0 for lane in rig.keys.lanes)
    assert rig.other_keys() == {rig.keys.dedup("k")}


async def test_take_gives_no_more_than_asked_and_better_lanes_first(rig: Rig) -> None:
    worker = await rig.worker()
    jobs = [await rig.submit(priority=priority) for priority in ("low", "normal", "high", "normal")]
    assert ids(await worker.take(2)) == [jobs[2].id, jobs[1].id]
    assert ids(await worker.take(9)) == [jobs[3].id, jobs[0].id]
    assert await worker.take(9) == []
    assert await worker.take(0) == []


async def test_a_lane_whose_oldest_job_aged_takes_turns_with_the_better_one(rig: Rig) -> None:
    worker = await rig.worker()
    old = [await rig.submit(priority="low") for _ in range(4)]
    for job in old:
        rig.make_older(job.id, 61)
    fresh = [await rig.submit(priority="high") for _ in range(4)]
    taken = [delivery.priority for delivery in await worker.take(4)]
    assert sorted(taken) == [HIGH, HIGH, LOW, LOW]
    assert len(await worker.take(9)) == 4
    assert len({*(j.id for j in old), *(j.id for j in fresh)}) == 8


async def test_a_job_that_aged_once_ranks_one_lane_higher_not_two(rig: Rig) -> None:
    worker = await rig.worker()
    low = await rig.submit(priority="low")
    rig.make_older(low.id, 31)
    normal, high = await rig.submit(priority="normal"), await rig.submit(priority="high")
    taken = ids(await worker.take(3))
    assert taken[0] == high.id
    assert {*taken[1:]} == {low.id, normal.id}


async def test_attempts_are_counted_at_begin_once_and_bounded(rig: Rig) -> None:
    worker = await rig.worker(max_attempts=2)
    await rig.submit()
    for attempt in range(2):
        (delivery,) = await worker.take(1)
        assert delivery.attempt == attempt
        assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
        assert await worker.begin([delivery]) == [BeginOutcome.STARTED], "a repeat counts once"
        await worker.retry(delivery, delay_s=0, reason="engine died")
        await worker.sweep()
    (delivery,) = await worker.take(1)
    assert await worker.begin([delivery]) == [BeginOutcome.EXHAUSTED]
    failed = Reply(id=delivery.id, status=Status.FAILED, attempt=2)
    assert await worker.finish([Answer(delivery, failed, dead_reason="too_many_attempts")]) == [True]
    ((_, dead),) = rig.admin.xrange(rig.keys.dead)
    assert (dead["id"], dead["reason"], dead["attempts"], dead["consumer"]) == (
        delivery.id,
        "too_many_attempts",
        "2",
        "w1",
    )


async def test_a_batch_begins_without_what_another_worker_took_from_its_middle(rig: Rig) -> None:
    """Whatever the order, and across lanes."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    for priority in ("normal", "normal", "normal", "normal", "low"):
        await rig.submit(priority=priority)
    taken = await first.take(9)
    rig.admin.xclaim(rig.keys.lane(NORMAL), GROUP, second.consumer, 0, [taken[1].entry_id], justid=True)
    started, lost = BeginOutcome.STARTED, BeginOutcome.LOST
    assert await first.begin(taken[:4]) == [started, lost, started, started]
    assert await first.begin(taken) == [started, lost, started, started, started]
    assert await first.begin(taken[::-1]) == [started, started, started, lost, started]
    assert [(await rig.producer.status(delivery.id)).attempt for delivery in taken] == [1, 0, 1, 1, 1]


async def test_release_hands_back_at_once_in_place_and_keeps_the_attempts(rig: Rig) -> None:
    first, second = await rig.worker("w1"), await rig.worker("w2")
    jobs = [await rig.submit() for _ in range(3)]
    taken = await first.take(2)
    await first.begin(taken[:1])
    await first.release(taken[:1], begun=True)
    await first.release(taken[1:], begun=False)
    again = await second.take(9)
    assert ids(again) == [job.id for job in jobs], "before what is newer"
    assert [(d.attempt, d.runs_alone) for d in again] == [(0, False)] * 3
    await first.release(taken, begun=True)
    assert await second.begin(again) == [BeginOutcome.STARTED] * 3, "a late release of what another holds does nothing"


async def test_retry_waits_for_its_delay_and_keeps_the_submit_time(rig: Rig) -> None:
    worker = await rig.worker()
    job = await rig.submit(priority="low")
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    await worker.retry(delivery, delay_s=60, reason="engine died")
    await worker.sweep()
    assert await worker.take(1) == []
    assert (await job.status()).state is JobState.DELAYED
    assert (await worker.stats()).delayed == 1
    (member,) = rig.raw.zrange(rig.keys.delayed, 0, -1)
    rig.raw.zadd(rig.keys.delayed, {member: 0})
    await worker.sweep()
    (again,) = await worker.take(1)
    assert again._replace(taken_at=0, taken_at_ms=0, entry_id="") == delivery._replace(
        taken_at=0, taken_at_ms=0, entry_id="", attempt=1, runs_alone=True
    )
    await worker.retry(delivery, delay_s=0, reason="a repeat whose first reply was lost")
    assert (await worker.stats()).delayed == 0


async def test_a_late_retry_of_what_another_holds_does_nothing(rig: Rig) -> None:
    """mastra#23698: another worker claimed it in between."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    await rig.submit()
    (delivery,) = await first.take(1)
    rig.end_lease(delivery, "w1")
    (again,) = await second.take(1)
    await first.retry(delivery, delay_s=0, reason="engine died")
    assert (await second.stats()).delayed == 0
    assert await second.begin([again]) == [BeginOutcome.STARTED]
    assert await second.finish([ok(again)]) == [True]


async def test_delayed_jobs_survive_the_loss_of_their_record(rig: Rig) -> None:
    worker = await rig.worker()
    await rig.submit("kept")
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    await worker.retry(delivery, delay_s=0, reason="engine died")
    rig.admin.delete(rig.keys.job(delivery.id))
    await worker.sweep()
    (again,) = await worker.take(1)
    assert (again.job.prompt, again.attempt, again.enqueued_at_ms) == ("kept", 1, delivery.enqueued_at_ms)


async def test_the_first_answer_wins_whoever_owns_the_entry(rig: Rig) -> None:
    first, second = await rig.worker("w1"), await rig.worker("w2")
    job = await rig.submit()
    (delivery,) = await first.take(1)
    await first.begin([delivery])
    rig.end_lease(delivery, "w1")
    (again,) = await second.take(1)
    await second.begin([again])
    assert await first.finish([ok(delivery, "late, but first")]) == [True]
    assert await second.finish([ok(again, "second")]) == [False]
    assert await first.finish([ok(delivery, "late, but first")]) == [True], "a repeat of the winner is told so"
    assert rig.answers(job.id) == 1
    assert (await job.result(timeout=5)).text == "late, but first"


async def test_an_answered_job_that_comes_back_is_dropped(rig: Rig) -> None:
    """redis#5433: a failover loses the last acknowledgements."""
    worker = await rig.worker()
    job = await rig.submit()
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    await worker.finish([ok(delivery)])
    rig.admin.xadd(rig.keys.lane(NORMAL), {"id": job.id, "job": encode(delivery.job)})
    assert await worker.take(1) == []
    assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 0
    assert rig.admin.xpending(rig.keys.lane(NORMAL), GROUP)["pending"] == 0
    assert rig.answers(job.id) == 1


async def test_finish_of_many_is_one_command(rig: Rig) -> None:
    worker = await rig.worker()
    jobs = await rig.producer.submit_many([{"prompt": str(i)} for i in range(32)])
    deliveries = await worker.take(32)
    await worker.begin(deliveries)
    assert await worker.finish([ok(d, d.job.prompt or "") for d in deliveries]) == [True] * 32
    replies = await asyncio.gather(*(job.result(timeout=5) for job in jobs))
    assert [reply.text for reply in replies] == [str(i) for i in range(32)]


async def test_deltas_are_the_owners_and_end_with_the_answer(rig: Rig) -> None:
    first, second = await rig.worker("w1"), await rig.worker("w2")
    job = await rig.submit(stream=True)
    (delivery,) = await first.take(1)
    await first.begin([delivery])
    deltas = [Delta(attempt=1, offset_tokens=i, text=str(i), token_ids=[i]) for i in range(3)]
    assert await asyncio.gather(*(first.append(delivery, delta) for delta in deltas)) == [True] * 3
    assert 0 < rig.admin.pttl(rig.keys.reply(job.id)) <= 3_600_000
    assert not await second.append(delivery, deltas[0])
    await first.finish([ok(delivery, "012")])
    assert not await first.append(delivery, deltas[0])
    assert [list(fields) for _, fields in rig.raw_reply(job.id)] == [["delta"]] * 3 + [["done"]]


async def test_a_wait_ends_when_something_comes_and_when_woken(rig: Rig) -> None:
    worker = await rig.worker(block_ms=5000)
    assert await worker.take(1) == []
    waiting = asyncio.create_task(worker.wait(30))
    await asyncio.sleep(0)
    await rig.submit()
    async with asyncio.timeout(4):
        await waiting
    assert len(await worker.take(1)) == 1
    waiting = asyncio.create_task(worker.wait(30))
    await asyncio.sleep(0)
    worker.wake()
    async with asyncio.timeout(4):
        await waiting
    await rig.submit()
    async with asyncio.timeout(4):
        await worker.wait(30)


async def test_a_job_submitted_before_any_worker_is_found(rig: Rig) -> None:
    """faststream#2694: the group starts at 0."""
    await rig.producer.submit_many([{"prompt": "x"}] * 100)
    worker = await rig.worker()
    assert len(await worker.take(200)) == 100


async def test_stats_tell_where_everything_is(rig: Rig) -> None:
    worker = await rig.worker()
    jobs = [await rig.submit(priority=p) for p in ("high", "normal", "normal", "low")]
    rig.make_older(jobs[1].id, 12)
    await worker.take(2)
    stats = await worker.stats()
    assert stats.length == {HIGH: 1, NORMAL: 2, LOW: 1}
    assert (stats.pending, stats.lag, stats.held, stats.delayed, stats.dead) == (2, 2, 0, 0, 0)
    assert 12 <= stats.oldest_s[NORMAL] < 60


async def test_a_worker_of_another_model_is_refused_while_the_first_lives(rig: Rig) -> None:
    await rig.worker("w1", served_models=("qwen",))
    await rig.worker("w2", served_models=("qwen",))
    with pytest.raises(ModelMismatch, match="serves qwen"):
        await rig.worker("w3", served_models=("llama",))
    rig.admin.delete(rig.keys.worker("w1"), rig.keys.worker("w2"))
    await rig.worker("w3", served_models=("llama",))


async def test_a_worker_that_has_gone_and_holds_nothing_lets_another_model_in(rig: Rig) -> None:
    """At once; one that holds an entry is still waited for: its model's job is not the other's."""
    first = await rig.worker("w1", served_models=("qwen",))
    holder = await rig.worker("w2", served_models=("qwen",))
    await rig.submit()
    assert len(await holder.take(1)) == 1
    await first.close()
    assert not rig.admin.exists(rig.keys.worker("w1"))
    await holder.close()
    with pytest.raises(ModelMismatch, match="worker w2 serves qwen"):
        await rig.worker("w3", served_models=("llama",))


async def test_a_worker_without_a_server_closes_all_the_same(rig: Rig) -> None:
    worker = await rig.worker("w1")
    await worker._link._commands.close()
    worker._link.run = _unreachable
    await worker.close()


async def _unreachable(name: str, args: object) -> None:
    raise QueueUnavailable(f"{name}: nobody is there")
