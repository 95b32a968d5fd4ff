"""Entries that no client of ours wrote: each is accounted for, none stops the worker."""

from __future__ import annotations

import random

import msgpack

from edgellm_producer import Job, Status
from edgellm_producer.keys import GROUP
from edgellm_producer.wire import encode
from tests.support.queue_rig import HIGH, NORMAL, Rig, ids, ok


def put(rig: Rig, **fields: bytes | str) -> str:
    return str(rig.admin.xadd(rig.keys.lane(NORMAL), fields))  # type: ignore[arg-type]


async def assert_drained(rig: Rig) -> None:
    assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 0
    assert rig.admin.xpending(rig.keys.lane(NORMAL), GROUP)["pending"] == 0


async def test_a_bare_xadd_is_a_job(rig: Rig) -> None:
    """The protocol for a shell: one field, `job`."""
    worker = await rig.worker()
    envelope = encode(Job(id="bare", prompt="hi", timeout_s=60.0, tenant="t", reply_ttl_s=60))
    entry = put(rig, job=envelope)
    (delivery,) = await worker.take(1)
    submitted = int(entry.split("-")[0])
    assert (delivery.id, delivery.enqueued_at_ms, delivery.deadline_ms) == ("bare", submitted, submitted + 60_000)
    await worker.begin([delivery])
    worker.forget([delivery])
    rig.end_lease(delivery, "w1")
    (again,) = await worker.take(1)
    assert (again.attempt, again.runs_alone) == (1, False), "its id is known only once its envelope is read"
    await worker.finish([ok(again)])
    assert (await rig.producer.job("bare").result(timeout=5)).text == "text"
    assert rig.other_keys() == set()
    await assert_drained(rig)


async def test_a_second_entry_of_a_known_job_is_dropped(rig: Rig) -> None:
    worker = await rig.worker()
    job = await rig.submit("first")
    put(rig, id=job.id, job=encode(Job(id=job.id, prompt="second")))
    put(rig, job=encode(Job(id=job.id, prompt="third")))
    (delivery,) = await worker.take(9)
    assert delivery.job.prompt == "first"
    await worker.finish([ok(delivery)])
    assert rig.answers(job.id) == 1
    await assert_drained(rig)


async def test_what_cannot_be_decoded_is_a_dead_letter_and_a_failed_reply_where_an_id_can_be_read(rig: Rig) -> None:
    worker = await rig.worker()
    good = await rig.submit()
    put(rig, id="known", job=b"\xc1\x00")
    put(rig, job=b"\xc1\x00")
    put(rig, other="field")
    put(rig, job=msgpack.packb([1, 2]))
    put(rig, job=msgpack.packb({"v": 1, "prompt": "no id"}))
    put(rig, id="bad{}id", job=b"\xc1")
    assert ids(await worker.take(9)) == [good.id]
    reply = await rig.producer.job("known").reply(timeout=5)
    assert (reply.status, reply.error and reply.error.code) == (Status.FAILED, "malformed")
    letters = rig.admin.xrange(rig.keys.dead)
    assert [fields["id"] for _, fields in letters] == ["known", "", "", "", "", ""]
    assert {fields["reason"] for _, fields in letters} == {"malformed"}
    assert (await worker.stats()).dead == 6
    assert worker.counters.answered == {"malformed": 6}


async def test_an_invalid_job_is_rejected_by_the_name_of_its_field(rig: Rig) -> None:
    worker = await rig.worker()
    cases = {
        "range": ({"prompt": "x", "top_p": 7}, "invalid_field", "top_p"),
        "unknown": ({"prompt": "x", "beams": 3}, "unsupported_field", "beams"),
        "missing": ({}, "invalid_field", "prompt"),
        "unbuilt": (
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            "unsupported_field",
            "tool_choice",
        ),
        "other": ({"prompt": "x", "id": "not-the-entrys"}, "invalid_field", "id"),
    }
    for job_id, (fields, _, _) in cases.items():
        put(rig, id=job_id, job=msgpack.packb({"v": 1, "id": job_id, **fields}))
    assert await worker.take(9) == []
    for job_id, (_, code, field) in cases.items():
        reply = await rig.producer.job(job_id).reply(timeout=5)
        assert reply.error is not None
        assert (reply.status, reply.error.code, reply.error.field) == (Status.REJECTED, code, field), job_id
    assert rig.admin.xlen(rig.keys.dead) == 0
    await assert_drained(rig)


async def test_a_newer_version_is_delayed_twice_then_given_up(rig: Rig) -> None:
    """river#1324."""
    worker = await rig.worker(newer_version_delay_s=0)
    put(rig, id="new", job=msgpack.packb({"v": 2, "id": "new", "prompt": "x", "hologram": True}))
    for _ in range(2):
        assert await worker.take(1) == []
        assert rig.admin.zcard(rig.keys.delayed) == 1
        await worker.sweep()
    assert await worker.take(1) == []
    reply = await rig.producer.job("new").reply(timeout=5)
    assert (reply.status, reply.error and reply.error.code) == (Status.FAILED, "unsupported_version")
    ((_, dead),) = rig.admin.xrange(rig.keys.dead)
    assert dead["reason"] == "unsupported_version"
    assert rig.other_keys() == set()


async def test_two_unreadable_entries_of_one_id_are_one_answer(one_rig: Rig) -> None:
    """Refused in one call or in two: who says the same twice is not the same entry twice."""
    worker = await one_rig.worker()
    put(one_rig, id="twin", job=b"\xc1")
    put(one_rig, id="twin", job=b"\xc1\x00")
    assert await worker.take(9) == []
    put(one_rig, id="twin", job=b"\xc1\x00\x00")
    assert await worker.take(9) == []
    assert worker.counters.answered == {"malformed": 1}
    assert one_rig.answers("twin") == 1
    await assert_drained(one_rig)


async def test_2000_random_and_mutated_entries_are_all_accounted_for(one_rig: Rig) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    worker = await one_rig.worker()
    model = encode(Job(id="x", prompt="hello", stop=["a"], metadata={"k": [1, 2]}, timeout_s=5.0))
    with one_rig.raw.pipeline(transaction=False) as pipeline:
        for number in range(2000):
            pipeline.xadd(one_rig.keys.lane(NORMAL), {b"job": mutated(dice, model, number), **extra(dice, number)})
        pipeline.execute()
    answered = 0
    while one_rig.admin.xlen(one_rig.keys.lane(NORMAL)):
        deliveries = await worker.take(64)
        answered += sum(await worker.finish([ok(d) for d in deliveries]))
    counted = answered + sum(worker.counters.answered.values())
    replies = len(list(one_rig.admin.scan_iter(one_rig.keys.done("*"), count=1000)))
    unnamed = sum(fields["id"] == "" for _, fields in one_rig.admin.xrange(one_rig.keys.dead))
    assert counted == replies + unnamed
    assert replies + unnamed >= 1000, "some ids repeat; most entries have one of their own"
    await assert_drained(one_rig)


def mutated(dice: random.Random, model: bytes, number: int) -> bytes:
    if dice.random() < 0.3:
        return dice.randbytes(dice.randrange(40))
    envelope = bytearray(msgpack.packb({**msgpack.unpackb(model), "id": f"job-{number}"}))
    for _ in range(dice.randrange(4)):
        envelope[dice.randrange(len(envelope))] = dice.randrange(256)
    return bytes(envelope[: dice.choice([len(envelope), dice.randrange(len(envelope))])])


def extra(dice: random.Random, number: int) -> dict[bytes, bytes]:
    return {b"id": dice.choice([f"job-{number}".encode(), dice.randbytes(4)])} if dice.random() < 0.5 else {}


async def test_one_lane_that_is_no_stream_stops_no_other(rig: Rig) -> None:
    """A stranger's key where a lane should be: at the start, while others are read, claimed, swept and counted."""
    rig.admin.set(rig.keys.lane(HIGH), "squatter")
    worker, second = await rig.worker("w1"), await rig.worker("w2")
    jobs = [await rig.submit() for _ in range(2)]
    deliveries = await worker.take(9)
    assert ids(deliveries) == [job.id for job in jobs]
    rig.end_lease(deliveries[0], "w1")
    assert ids(await second.take(9)) == [deliveries[0].id]
    await second.sweep()
    assert (await second.stats()).pending == 2
    assert await worker.finish([ok(d) for d in deliveries]) == [True] * 2
    healed = await rig.submit(priority="high")
    assert ids(await worker.take(9)) == [healed.id]


async def test_a_lane_that_is_overwritten_has_its_jobs_answered_and_takes_new_ones(rig: Rig) -> None:
    worker = await rig.worker()
    lost, delayed = await rig.submit(priority="high"), await rig.submit(priority="high")
    (_, delivery) = await worker.take(2)
    worker.forget([delivery])
    await worker.retry(delivery, delay_s=0, reason="engine died")
    rig.admin.set(rig.keys.lane(HIGH), "squatter")
    rig.admin.zadd(rig.keys.checks, {lost.id: 1})
    rig.admin.hset(rig.keys.job(lost.id), "begun", "")
    await worker.sweep()
    (again,) = await worker.take(9)
    assert again.id == delayed.id
    reply = await lost.reply(timeout=5)
    assert reply.error is not None
    assert reply.error.code == "entry_deleted"
