"""`edgellm-producer batch` killed at random moments and resumed: each custom_id exactly once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import DEVNULL, PIPE

from edgellm_producer.batch.output import journal_path
from tests.support.instant_worker import echo, instant_worker

NUM_LINES = 400
NUM_KILLS = 10
SEED = int(os.environ.get("EDGELLM_TEST_SEED", "20261130"))


def input_lines() -> bytes:
    bodies = ({"model": "tiny", "prompt": f"text {i}"} for i in range(NUM_LINES))
    lines = (
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def start(url: str, queue: str, *words: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "edgellm_producer.cli", "batch", *words, "--redis-url", url, "--queue", queue)
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


async def test_kill_and_resume_ten_times(default_server, queue_name, tmp_path):
    print("seed", SEED)
    rng = random.Random(SEED)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(input_lines())
    started: list[str] = []

    def answer(delivery):
        started.append(delivery.id)
        return echo(delivery)

    async with instant_worker(default_server.url, queue_name, answer, batch=2) as queue:
        queue.finish = slowed(queue.finish)
        for _ in range(NUM_KILLS):
            run = await start(default_server.url, queue_name, str(source), "-o", str(output), "--window", "16")
            wanted = lines_in(output) + rng.randrange(1, 25)
            while lines_in(output) < wanted and run.returncode is None:
                await asyncio.sleep(0.005)
            await asyncio.sleep(rng.random() * 0.05)
            assert run.returncode is None, "finished before it could be killed"
            run.kill()
            await run.wait()
        run = await start(default_server.url, queue_name, str(source), "-o", str(output), "--window", "64")
        assert await run.wait() == 0
    found = [json.loads(text) for text in output.read_bytes().splitlines()]
    assert sorted(line["custom_id"] for line in found) == sorted(f"r{i}" for i in range(NUM_LINES))
    assert all(line["response"]["body"]["choices"][0]["text"].startswith("TEXT ") for line in found)
    assert len(started) == len(set(started)) == NUM_LINES, "a job was run again"
    assert not journal_path(output).exists()


def lines_in(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def slowed(finish):
    async def slow(answers):
        await asyncio.sleep(0.01)
        return await finish(answers)

    return slow


async def test_standard_input_and_output_work(default_server, queue_name):
    async with instant_worker(default_server.url, queue_name):
        run = await start(default_server.url, queue_name, "-", "-o", "-")
        written, _ = await run.communicate(input_lines())
    assert run.returncode == 0
    assert {json.loads(text)["custom_id"] for text in written.splitlines()} == {f"r{i}" for i in range(NUM_LINES)}


async def test_a_queue_out_of_reach_is_exit_code_3(tmp_path, queue_name):
    source = tmp_path / "in.jsonl"
    source.write_bytes(input_lines())
    run = await start("unix:///nowhere.sock", queue_name, str(source), "--unreachable-s", "0")
    assert await run.wait() == 3
