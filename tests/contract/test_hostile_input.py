"""What somebody writes who means harm: bombs, forged log lines, names without end. Each is accounted for."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import re
import struct
import time
from typing import Any

import msgpack
import pytest
import structlog

from edgellm_producer import Status
from edgellm_producer.keys import GROUP, ID_FIELD, JOB_FIELD, Keys, Priority
from edgellm_producer.wire import MAX_JOB_BYTES, MAX_REPEATED_CHARACTERS, Job, encode
from edgellm_worker.daemon import Daemon, DaemonParts
from edgellm_worker.logs import LogFormat, configure_logs
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.daemons import config, metrics, model
from tests.support.fake_engine import FakeEngine
from tests.support.queue_rig import NORMAL, Rig, ok, until

GOOD = {"v": 1, "id": "x", "prompt": "hi"}
MIB = 1 << 20


def with_field(raw: bytes, name: bytes = b"metadata") -> bytes:
    """The good job and one more field, whose value is these bytes."""
    packed = msgpack.packb(GOOD)
    return bytes([packed[0] + 1]) + packed[1:] + msgpack.packb(name.decode()) + raw


NESTED_33: Any = "x"
for _ in range(33):
    NESTED_33 = [NESTED_33]

BOMBS = {
    "a million open lists": b"\x91" * (MIB - 1),
    "a million open maps": b"\x81\xa1a" * (MIB // 3),
    "a list that says it is four billion long": with_field(b"\xdd\xff\xff\xff\xff"),
    "a map that says it is four billion long": b"\xdf\xff\xff\xff\xff" + b"\xa1a\x01" * 10,
    "a string that says it is four gigabytes": with_field(b"\xdb\xff\xff\xff\xffabc"),
    "bytes that say they are four gigabytes": with_field(b"\xc6\xff\xff\xff\xff"),
    "an extension that says it is four gigabytes": with_field(b"\xc9\xff\xff\xff\xff\x05"),
    "a type that is no type": with_field(b"\xc1"),
    "33 levels": with_field(msgpack.packb(NESTED_33)),
    "800 levels": with_field(b"\x91" * 800 + b"\xc0"),
    "text that is no UTF-8": with_field(b"\xa2\xff\xfe"),
    "two messages": msgpack.packb(GOOD) * 2,
    "over the limit by one": with_field(msgpack.packb("x" * (MAX_JOB_BYTES - 32))),
    "five megabytes": with_field(msgpack.packb("x" * (5 * MIB))),
    "keys that are lists": b"\x81\x91\x01\x02",
    "keys that are numbers": msgpack.packb({1: 2}),
}
REFUSED = {
    "a key of a megabyte": with_field(b"\x01", b"k" * (MIB - 100)),
    "forged lines in a key": with_field(b"\x01", b"\n2026-01-01T00:00:00Z error   \x1b[2J"),
    "a version of a megabyte": msgpack.packb({**GOOD, "v": "9" * (MIB - 100)}),
    "a format of a megabyte": msgpack.packb({**GOOD, "response_format": {"type": "t" * (MIB - 200)}}),
    "an extension in a field": with_field(b"\xd4\x05x", b"seed"),
    "a timestamp in a field": with_field(b"\xd6\xff\x00\x00\x00\x01", b"max_tokens"),
    "not a number": with_field(b"\xcb" + struct.pack(">d", math.nan), b"temperature"),
    "infinity": with_field(b"\xcb" + struct.pack(">d", math.inf), b"top_p"),
    "the largest number": with_field(b"\xcf" + b"\xff" * 8, b"max_tokens"),
}


def put(rig: Rig, job: bytes, **fields: bytes) -> None:
    rig.raw.xadd(rig.keys.lane(NORMAL), {b"job": job, **{name.encode(): value for name, value in fields.items()}})


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_a_dead_letter_and_a_failed_reply(one_rig: Rig, name: str) -> None:
    worker = await one_rig.worker()
    put(one_rig, BOMBS[name], id=b"bomb")
    after = await one_rig.submit("after")
    (delivery,) = await worker.take(9)
    assert await worker.finish([ok(delivery)]) == [True]
    reply = await one_rig.producer.job("bomb").reply(timeout=5)
    assert (reply.status, reply.error and reply.error.code) == (Status.FAILED, "malformed")
    assert (await after.result(timeout=5)).text == "text"
    ((_, letter),) = one_rig.raw.xrange(one_rig.keys.dead)
    assert letter[b"job"] == BOMBS[name], "kept as it came, for somebody to look at"


@pytest.mark.parametrize("name", REFUSED)
async def test_a_hostile_field_is_refused_in_few_words(one_rig: Rig, name: str) -> None:
    worker = await one_rig.worker()
    put(one_rig, REFUSED[name], id=b"x")
    assert await worker.take(9) == []
    reply = await one_rig.producer.job("x").reply(timeout=5)
    assert reply.status is Status.REJECTED
    assert reply.error is not None
    assert reply.error.field
    assert len(reply.error.field) + len(reply.error.message) < 3 * MAX_REPEATED_CHARACTERS


@pytest.mark.parametrize(
    "entry_id", [b"x\n", b"\n", b"a b", b"{x}", b"..:..", b"\x1b[2J", b"x" * 129, b"x\0", "ü".encode()]
)
async def test_an_id_that_is_none_never_becomes_a_key(one_rig: Rig, entry_id: bytes) -> None:
    worker = await one_rig.worker()
    put(one_rig, b"\xc1", id=entry_id)
    put(one_rig, msgpack.packb({**GOOD, "id": entry_id.decode()}))
    assert await worker.take(9) == []
    assert [letter[b"id"] for _, letter in one_rig.raw.xrange(one_rig.keys.dead)] == [b"", b""]
    assert one_rig.other_keys() == set()
    assert list(one_rig.admin.scan_iter(one_rig.keys.prefix + "done:*")) == []


@pytest.mark.parametrize("name", ["q\n", "a b", "{q}", "", "q" * 65])
def test_a_queue_of_such_a_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="queue"):
        Keys(name)


HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 63, 1e308, math.nan, "", "\n\x1b[31m", "\x00", "é" * 1000, b"\xff"),
    *(
        [],
        {},
        [[]],
        {"a": [None]},
        ["x"] * 5000,
        {"role": "user"},
        [{"role": "user", "content": "x"}],
        msgpack.ExtType(5, b"x"),
    ),
)


def mutated(dice: random.Random, number: int) -> bytes:
    """Noise, bombs, and jobs with fields of every wrong kind and with flipped bytes."""
    kind = dice.random()
    if kind < 0.1:
        return dice.randbytes(dice.randrange(60))
    if kind < 0.12:
        return dice.choice([bomb for bomb in BOMBS.values() if len(bomb) < 2000])
    fields = {**GOOD, "id": f"job-{number}"}
    names = [*Job.model_fields, "no_such_field", "\n\x1b[2J"]
    for name in dice.sample(names, dice.randrange(3)):
        fields[name] = dice.choice(HOSTILE_VALUES)
    envelope = bytearray(msgpack.packb(fields))
    for _ in range(dice.choice([0, 0, 1, 3])):
        envelope[dice.randrange(len(envelope))] = dice.randrange(256)
    return bytes(envelope[: dice.choice([len(envelope)] * 4 + [dice.randrange(len(envelope))])])


async def account(rig: Rig, seed: int, count: int) -> None:
    """Every entry ends as one reply or as one dead letter without a readable id."""
    print("seed", seed)
    dice = random.Random(seed)
    worker = await rig.worker(newer_version_delay_s=0, max_dead_letters=2 * count)
    with rig.raw.pipeline(transaction=False) as pipeline:
        for number in range(count):
            named = {b"id": dice.choice([f"job-{number}".encode(), dice.randbytes(4)])} if dice.random() < 0.5 else {}
            lane = rig.keys.lane(dice.choice(list(Priority)))
            pipeline.xadd(lane, {b"job": mutated(dice, number), **named})
        pipeline.execute()
    answered = 0
    while any(rig.admin.xlen(lane) for lane in rig.keys.lanes) or rig.admin.zcard(rig.keys.delayed):
        await worker.sweep()
        answered += sum(await worker.finish([ok(d) for d in await worker.take(64)]))
    replies = sum(1 for _ in rig.admin.scan_iter(rig.keys.done("*"), count=5000))
    unnamed = sum(letter[b"id"] == b"" for _, letter in rig.raw.xrange(rig.keys.dead))
    assert answered + sum(worker.counters.answered.values()) == replies + unnamed
    assert replies + unnamed >= count * 0.9, "a few flipped ids meet others; those entries are second ones of a job"
    assert rig.other_keys() == set()
    for lane in rig.keys.lanes:
        assert rig.admin.xpending(lane, GROUP)["pending"] == 0


async def test_2000_hostile_entries_are_each_a_reply_or_a_dead_letter(one_rig: Rig) -> None:
    await account(one_rig, random.randrange(1 << 32), 2000)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_20000_hostile_entries_are_each_a_reply_or_a_dead_letter(one_rig: Rig) -> None:
    await account(one_rig, random.randrange(1 << 32), 20_000)


@pytest.fixture
def logged(request):
    """Lines of a daemon's log in one of the formats."""
    before = structlog.get_config()
    stream = io.StringIO()
    configure_logs(request.param, stream=stream)
    yield request.param, stream
    structlog.configure(**before)


async def served(worker: RedisQueue, rig: Rig) -> Daemon:
    """A daemon that has emptied the lanes."""
    engine = FakeEngine(at_once=True)
    daemon = Daemon(DaemonParts(worker, engine, model(), metrics(engine.limits), time.monotonic), config(read_size=16))
    running = asyncio.create_task(daemon.run())
    await until(lambda: not any(rig.admin.xlen(lane) for lane in rig.keys.lanes), 250)
    daemon.stop()
    await running
    return daemon


@pytest.mark.parametrize("logged", list(LogFormat), indirect=True)
async def test_no_job_can_forge_a_line_of_the_log(one_rig: Rig, logged) -> None:
    form, stream = logged
    forged = "\n2026-01-01T00:00:00Z error   engine failed\r\x1b[2J\x1b]0;title\x07\u2028\u0085"
    worker = await one_rig.worker("w\n\x1b[31m")
    for number, fields in enumerate(
        [{"model": forged}, {"stop": [forged]}, {forged: 1}, {"prompt": forged}, {"v": forged}]
    ):
        job = msgpack.packb({**GOOD, "id": f"f{number}", **fields})
        one_rig.raw.xadd(one_rig.keys.lane(NORMAL), {ID_FIELD: f"f{number}".encode(), JOB_FIELD: job})
    put(one_rig, msgpack.packb({**GOOD, "id": forged}), id=forged.encode())
    await served(worker, one_rig)
    lines = stream.getvalue().split("\n")
    assert lines.pop() == ""
    assert len(lines) >= 2
    for line in lines:
        assert line.isprintable(), repr(line)
        assert json.loads(line) if form is LogFormat.JSON else re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \w+ +\w", line)
    assert not any(line.startswith("2026-01-01T00:00:00Z") for line in lines)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_tenants_and_models_without_end_make_no_series(one_rig: Rig, count: int) -> None:
    """docket#164."""
    worker = await one_rig.worker()
    before = len(metrics(FakeEngine(at_once=True).limits).render().splitlines())
    jobs = [{"prompt": "x", "max_tokens": 1, "tenant": f"tenant-{n}"} for n in range(count)]
    jobs = [{**job, "model": f"model-{n}"} if n % 2 else job for n, job in enumerate(jobs)]
    await one_rig.producer.submit_many(jobs)
    text = (await served(worker, one_rig)).render().decode()
    assert "tenant-" not in text
    assert "model-1" not in text
    assert len(text.splitlines()) <= before + 40
    assert one_rig.other_keys() == set()


def test_the_bombs_are_what_they_say() -> None:
    assert len(BOMBS["over the limit by one"]) == MAX_JOB_BYTES + 1
    assert encode(Job(**GOOD))
