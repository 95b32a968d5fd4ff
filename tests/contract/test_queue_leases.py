"""Leases: renewed by their holder, taken over from the dead, by one worker only; consumers that are gone."""

from __future__ import annotations

import asyncio

from edgellm_producer.keys import GROUP
from edgellm_worker.queue.api import BeginOutcome, Delivery
from tests.support.proxy import proxy_to
from tests.support.queue_rig import NORMAL, Rig, ids, ok, renewed, until
from tests.support.redis_server import RedisServer


async def test_reclaim_after_the_lease_and_the_job_runs_alone(rig: Rig) -> None:
    """ragflow#15805: whatever the name of the one that comes after."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    await rig.submit()
    (delivery,) = await first.take(1)
    await first.begin([delivery])
    assert await second.take(1) == []
    rig.end_lease(delivery, "w1")
    (again,) = await second.take(1)
    assert (again.id, again.attempt, again.runs_alone, again.solo_kills) == (delivery.id, 1, True, 0)
    assert second.counters.num_reclaimed == 1


async def test_reclaim_of_a_job_that_never_started_changes_nothing_of_it(rig: Rig) -> None:
    """llm-d-async#131: killed between the read and the first token."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    await rig.submit()
    (delivery,) = await first.take(1)
    rig.end_lease(delivery, "w1")
    (again,) = await second.take(1)
    assert (again.attempt, again.runs_alone) == (0, False)


async def test_two_deaths_alone_use_a_job_up(rig: Rig) -> None:
    """MemOS#2403: a job that kills the process."""
    worker = await rig.worker("w1", max_attempts=9)
    await rig.submit()
    for death in range(3):
        (delivery,) = await worker.take(1)
        assert delivery.solo_kills == max(0, death - 1)
        assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
        worker.forget([delivery])
        rig.end_lease(delivery, "w1")
    (delivery,) = await worker.take(1)
    assert delivery.solo_kills == 2
    assert await worker.begin([delivery]) == [BeginOutcome.EXHAUSTED]


async def test_renewal_is_one_command_and_finds_what_was_lost(rig: Rig) -> None:
    first, second = await rig.worker("w1", lease_s=0.6), await rig.worker("w2")
    await rig.producer.submit_many([{"prompt": "x"}] * 64)
    deliveries = await first.take(64)
    assert len(deliveries) == 64
    rig.end_lease(deliveries[0], "w1")
    taken = await second.take(64)
    assert ids(taken) == [deliveries[0].id]
    assert await until(first.lost) == {deliveries[0].id}
    rows = rig.admin.xpending_range(rig.keys.lane(NORMAL), GROUP, "-", "+", 100, "w1")
    assert len(rows) == 63
    assert all(row["time_since_delivered"] < 600 for row in rows)
    assert all(row["times_delivered"] == 1 for row in rows), "renewal is no delivery"


async def test_forgotten_deliveries_are_renewed_no_more(rig: Rig) -> None:
    first, second = await rig.worker("w1", lease_s=0.3), await rig.worker("w2", lease_s=0.3)
    kept, dropped = await rig.submit(), await rig.submit()
    deliveries = await first.take(2)
    first.forget([d for d in deliveries if d.id == dropped.id])
    async with asyncio.timeout(10):
        while not (taken := await second.take(2)):
            await second.wait(0.05)
    assert ids(taken) == [dropped.id]
    assert kept.id in ids(deliveries)


async def test_a_short_lease_takes_nothing_that_a_long_one_renews(rig: Rig) -> None:
    """Two workers of one queue whose leases differ: nobody takes over before the longer one is over."""
    first, second = await rig.worker("w1", lease_s=60.0), await rig.worker("w2", lease_s=0.05)
    await rig.submit()
    (delivery,) = await first.take(1)
    rig.admin.xclaim(rig.keys.lane(NORMAL), GROUP, "w1", 0, [delivery.entry_id], idle=59_000, justid=True)
    assert await second.take(1) == []
    rig.admin.xclaim(rig.keys.lane(NORMAL), GROUP, "w1", 0, [delivery.entry_id], idle=61_000, justid=True)
    assert ids(await second.take(1)) == [delivery.id]
    rig.admin.delete(rig.keys.lease)
    await renewed(second)
    assert rig.admin.get(rig.keys.lease) == "50", "the long one is gone"
    assert 0 < rig.admin.pttl(rig.keys.lease) <= 100


async def test_a_ghost_is_acknowledged_and_stops_nothing(rig: Rig) -> None:
    """redis#10756: an entry that was deleted while pending."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    await rig.submit()
    kept = await rig.submit()
    deliveries = await first.take(2)
    for delivery in deliveries:
        rig.end_lease(delivery, "w1")
    rig.admin.xdel(rig.keys.lane(NORMAL), deliveries[0].entry_id)
    assert ids(await second.take(2)) == [kept.id]
    assert rig.admin.xpending(rig.keys.lane(NORMAL), GROUP)["pending"] == 1


async def test_one_dead_lease_behind_5000_live_ones_is_found(rig: Rig) -> None:
    """docket#467."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    await rig.producer.submit_many([{"prompt": "x"}] * 5001)
    deliveries = await first.take(5001)
    rig.end_lease(deliveries[-1], "w1")
    assert ids(await second.take(1)) == [deliveries[-1].id]


async def test_dead_consumers_go_when_they_hold_nothing(rig: Rig) -> None:
    """hyperswitch#13811 and redis#9745: bounded consumers, and no entry goes with one."""
    for number in range(5):
        worker = await rig.worker(f"gone-{number}")
        await rig.submit()
        (delivery,) = await worker.take(1)
        if number:
            await worker.finish([ok(delivery)])
    last = await rig.worker("last")
    for number in range(5):
        rig.admin.delete(rig.keys.worker(f"gone-{number}"))
    await last.sweep()
    names = {consumer["name"] for lane in rig.keys.lanes for consumer in rig.admin.xinfo_consumers(lane, GROUP)}
    assert names == {"gone-0", "last"}


async def test_ten_workers_start_at_once_and_share_the_jobs(rig: Rig) -> None:
    """sidekiq#4611: while jobs run on another already."""
    await rig.producer.submit_many([{"prompt": "x"}] * 110)
    first = await rig.worker("first")
    running = await first.take(10)
    await first.begin(running)
    workers = await asyncio.gather(*(rig.worker(f"w{i}") for i in range(10)))
    taken = await asyncio.gather(*(worker.take(10) for worker in workers))
    all_ids = [d.id for deliveries in (running, *taken) for d in deliveries]
    assert len(all_ids) == len(set(all_ids)) == 110


async def test_an_idle_stream_is_reclaimed_from_without_a_new_message(rig: Rig) -> None:
    """Whoever drained the queue and waits for news looks after the leases of others all the same."""
    first, second = await rig.worker("w1"), await rig.worker("w2", reclaim_interval_s=0.05, block_ms=30_000)
    await rig.submit()
    (delivery,) = await first.take(1)
    assert await second.take(1) == []
    rig.end_lease(delivery, "w1")
    taken: list[Delivery] = []
    async with asyncio.timeout(10):
        while not taken:
            await second.wait(0.1)
            taken = await second.take(1)
    assert ids(taken) == [delivery.id]
    await rig.submit()  # ends the blocked read


async def test_a_group_made_anew_over_finished_entries_delivers_nothing(rig: Rig) -> None:
    worker = await rig.worker()
    jobs = [await rig.submit() for _ in range(3)]
    deliveries = await worker.take(9)
    await worker.begin(deliveries)
    await worker.finish([ok(d) for d in deliveries])
    assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 0, "an answered entry is deleted, not only acknowledged"
    rig.admin.xgroup_destroy(rig.keys.lane(NORMAL), GROUP)
    assert await worker.take(9) == []
    assert [rig.answers(job.id) for job in jobs] == [1, 1, 1]


async def test_a_sweep_waits_for_no_other_worker(rig: Rig) -> None:
    """taskiq-redis#107: a lock would stay behind when the one that sweeps dies."""
    first, second = await rig.worker("w1"), await rig.worker("w2")
    await first.sweep()
    job = await rig.submit()
    (delivery,) = await first.take(1)
    await first.retry(delivery, delay_s=0, reason="engine died")
    await second.sweep()
    assert ids(await second.take(1)) == [job.id]


async def test_five_deploys_during_a_long_job_use_no_attempt_up(rig: Rig) -> None:
    """arq#267: three attempts allowed, five workers told to stop while it runs."""
    await rig.submit()
    for number in range(5):
        worker = await rig.worker(f"w{number}", max_attempts=3)
        (delivery,) = await worker.take(1)
        assert (delivery.attempt, delivery.runs_alone) == (0, False)
        assert await worker.begin([delivery]) == [BeginOutcome.STARTED]
        await worker.release([delivery], begun=True)


async def test_a_lease_is_renewed_early_enough_for_a_stall(one_rig: Rig, default_server: RedisServer) -> None:
    """streaq renews late: a stall of a third of the lease hands a job out twice."""
    async with proxy_to(default_server.socket_path) as proxy:
        first, second = await one_rig.worker("w1", url=proxy.url, lease_s=3.0), await one_rig.worker("w2", lease_s=3.0)
        await one_rig.submit()
        (delivery,) = await first.take(1)
        for stalls in (False, True, False):
            proxy.swallow = stalls
            for _ in range(24):
                assert await second.take(1) == []
                await asyncio.sleep(0.05)
        assert first.lost() == set()
        assert await first.begin([delivery]) == [BeginOutcome.STARTED]


async def test_eight_workers_claim_at_once_and_one_gets_it(rig: Rig) -> None:
    """redis#13956."""
    workers = await asyncio.gather(*(rig.worker(f"w{i}") for i in range(8)))
    await rig.submit()
    (delivery,) = await workers[0].take(1)
    workers[0].forget([delivery])
    rig.end_lease(delivery, "w0")
    taken = await asyncio.gather(*(worker.take(1) for worker in workers))
    assert sum(len(deliveries) for deliveries in taken) == 1
