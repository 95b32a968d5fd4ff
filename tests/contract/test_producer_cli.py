"""The producer's command line, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from edgellm_producer import Delta, Reply, Status
from edgellm_producer.cli import main
from edgellm_worker.queue.api import Answer
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.queue_rig import Rig, ids, ok


async def run(rig: Rig, *words: str) -> int:
    return await asyncio.to_thread(main, [*words, "--redis-url", rig.url, "--queue", rig.keys.queue])


async def serve_one(worker: RedisQueue, text: str, status: Status = Status.OK) -> None:
    async with asyncio.timeout(10):
        while not (deliveries := await worker.take(1)):
            await worker.wait(0.5)
    (delivery,) = deliveries
    await worker.begin([delivery])
    if delivery.job.stream:
        await worker.append(delivery, Delta(attempt=1, offset_tokens=0, text=text[:3], token_ids=[1]))
    await worker.finish(
        [Answer(delivery, Reply(id=delivery.id, status=status, text=text, token_ids=[1, 2], attempt=1))]
    )


async def test_submit_prints_the_text(one_rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    worker = await one_rig.worker()
    code, _ = await asyncio.gather(run(one_rig, "submit", "hi", "--max-tokens", "4"), serve_one(worker, "Hello"))
    assert (code, capsys.readouterr().out) == (0, "Hello\n")


async def test_submit_json_prints_the_reply_whatever_its_status(
    one_rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = await one_rig.worker()
    submit = run(one_rig, "submit", "hi", "--json", "--chat", "--system", "be brief")
    code, _ = await asyncio.gather(submit, serve_one(worker, "no", Status.FAILED))
    reply = json.loads(capsys.readouterr().out)
    assert (code, reply["status"], reply["text"]) == (1, "failed", "no")


async def test_no_wait_status_and_cancel(one_rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(one_rig, "submit", "hi", "--no-wait") == 0
    job_id = capsys.readouterr().out.strip()
    assert await run(one_rig, "status", job_id) == 0
    assert await run(one_rig, "cancel", job_id) == 0
    assert await run(one_rig, "status", job_id) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"{job_id} queued attempt=0",
        "cancelled",
        f"{job_id} done cancelled",
    ]
    assert shown.err.count("edgellm-producer: no worker serves queue") == 1
    assert await run(one_rig, "cancel", "nope") == 2


async def test_submit_says_once_that_no_worker_lives(
    one_rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm_producer.alone.TELL_AFTER_S", 0.0)
    submit = asyncio.create_task(run(one_rig, "submit", "hi"))
    told = ""
    async with asyncio.timeout(10):
        while "no worker serves queue" not in told:
            await asyncio.sleep(0.01)
            told += capsys.readouterr().err
    await serve_one(await one_rig.worker(), "Hello")
    assert await submit == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Hello\n", "")


async def test_the_answer_of_a_job_that_was_not_waited_for(one_rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    worker = await one_rig.worker()
    assert await run(one_rig, "submit", "hi", "--no-wait") == 0
    job_id = capsys.readouterr().out.strip()
    assert await run(one_rig, "result", job_id, "--timeout-s", "0.01") == 1
    assert f"no answer of {job_id} within 0.01 s" in capsys.readouterr().err
    code, _ = await asyncio.gather(run(one_rig, "result", job_id), serve_one(worker, "Hello"))
    assert (code, capsys.readouterr().out) == (0, "Hello\n")
    assert await run(one_rig, "result", job_id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == "Hello"
    assert await run(one_rig, "result", "nope") == 2


async def test_a_wrong_field_is_the_callers_mistake(one_rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(one_rig, "submit", "hi", "--top-p", "7") == 2
    assert "top_p" in capsys.readouterr().err


def test_no_redis_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "x", "--redis-url", "unix:///nowhere/redis.sock"]) == 3
    assert "edgellm-producer: Redis (--redis-url): " in capsys.readouterr().err
    assert main(["status", "x", "--redis-url", "http://localhost"]) == 2


async def test_dead_letters_are_listed_shown_tried_again_and_dropped(
    one_rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = await one_rig.worker()
    jobs = [await one_rig.submit(f"p{i}", idempotency_key=str(i)) for i in range(2)]
    for delivery in await worker.take(2):
        failed = Reply(id=delivery.id, status=Status.FAILED, attempt=3)
        await worker.finish([Answer(delivery, failed, dead_reason="poison")])
    one_rig.admin.xadd(one_rig.keys.lane("normal"), {"job": b"\xc1"})
    assert await worker.take(1) == []

    assert await run(one_rig, "dead", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4] for line in lines] == [
        [jobs[0].id, "poison", "attempts=3"],
        [jobs[1].id, "poison", "attempts=3"],
        ["-", "malformed", "attempts=0"],
    ]
    entry = lines[0].split()[0]
    assert await run(one_rig, "dead", "show", entry) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["reason"], shown["job"]["prompt"]) == ("poison", "p0")
    assert await run(one_rig, "dead", "drop", entry) == 0
    assert await run(one_rig, "dead", "drop", entry) == 2
    assert [await run(one_rig, "dead", action, "5") for action in ("show", "retry", "drop")] == [2, 2, 2]
    assert await run(one_rig, "dead", "retry") == 2
    assert await run(one_rig, "dead", "retry", "--all") == 1, "one of the two can not be read"
    (again,) = await worker.take(9)
    assert (again.job.prompt, again.attempt) == ("p1", 0)
    assert ids([again]) != [jobs[1].id]
    assert await worker.finish([ok(again)]) == [True]
    assert one_rig.admin.xlen(one_rig.keys.dead) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "99999"), "--port 99999: a port is a number from 0 to 65535"),
        (("--host", "nosuch.invalid"), "nosuch.invalid:8000: "),
        (("--api-keys", "/nowhere"), "/nowhere: No such file or directory"),
    ],
    ids=["port", "host", "keys"],
)
def test_a_gateway_that_cannot_start_says_why(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["gateway", *words]) == 2
    assert capsys.readouterr().err.startswith(f"gateway: {said}")


@pytest.mark.parametrize(
    "words",
    [("batch", "-", "--window", "0"), ("batch", "-", "--timeout-s", "nan"), ("gateway", "--timeout-s", "-1")],
    ids=" ".join,
)
def test_numbers_that_make_no_sense_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 2
    assert f"argument {words[-2]}: {words[-1]!r} is no number" in capsys.readouterr().err


def test_a_port_that_is_taken_is_the_operators_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["gateway", "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err
