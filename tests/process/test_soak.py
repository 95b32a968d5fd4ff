"""Many small jobs through the real daemon and its engine child: memory stays flat, and only documented keys stay.

What stays of an answered job, for as long as its time to live: the reply, the fence, and an idempotency key.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from edgellm_producer import Producer
from edgellm_producer.keys import Keys
from edgellm_producer.wire import Status
from tests.support.chaos import SCRIPT, children_of, left_over, path_of_workers
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.xdist_group("faults")

LOG = os.environ.get("EDGELLM_SOAK_LOG")
TOKENS = 4
EXPECTED_KINDS = {"done", "reply", "dedup", "jobs", "worker", "lease", "dead"}


def megabytes(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def jobs_of(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Plain ones, streamed ones, ones of tenants, with idempotency keys and deadlines, and some that are refused."""
    for number in range(count):
        fields: dict[str, Any] = {"id": f"s{seed}-{number}", "max_tokens": TOKENS, "ignore_eos": True}
        fields |= {"prompt_token_ids": [1 + number % 90, 1 + number % 900], "stream": number % 10 == 0}
        fields |= {"tenant": f"tenant-{number % 1000}"} if number % 3 == 0 else {}
        fields |= {"idempotency_key": f"key-{number}"} if number % 20 == 0 else {}
        fields |= {"timeout_s": 600.0} if number % 4 == 0 else {}
        fields |= {"model": "nobody's"} if number % 100 == 99 else {}
        yield {**fields, "priority": ("high", "normal", "low")[number % 3]}


@asynccontextmanager
async def worker_on(server: RedisServer, queue: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    env = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": path_of_workers(),
        "EDGELLM_CHAOS_ENGINE": "quick",
    }
    with (folder / "worker.log").open("w") as log:
        command = (sys.executable, str(SCRIPT), server.url, queue)
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def soak(server: RedisServer, queue: str, folder: Path, num_jobs: int) -> list[tuple[float, float]]:
    """Runs the jobs; resident megabytes of the worker and of its engine, as the jobs go by."""
    seed, started, sizes, statuses = secrets.randbits(32), time.monotonic(), [], Counter[str]()
    print("seed", seed)
    async with worker_on(server, queue, folder) as worker, Producer(server.url, queue=queue) as producer:
        async for outcome in producer.map(jobs_of(seed, num_jobs), concurrency=64, timeout_s=120):
            statuses[Status.OK if outcome.reply else type(outcome.error).__name__] += 1
            if sum(statuses.values()) % max(1, num_jobs // 100) == 0:
                engine = next(iter(children_of(worker.pid)), worker.pid)
                sizes.append((megabytes(worker.pid), megabytes(engine)))
    assert statuses == {Status.OK: num_jobs - num_jobs // 100, "JobRejected": num_jobs // 100}
    note(f"seed {seed}: {num_jobs} jobs in {time.monotonic() - started:.0f} s: {dict(statuses)}")
    return sizes


def note(line: str) -> None:
    print(line)
    if LOG:
        with Path(LOG).open("a") as file:
            file.write(line + "\n")


def check_keys(server: RedisServer, queue: str) -> None:
    keys = Keys(queue)
    with server.client(is_raw=True) as client:
        assert left_over(client, keys) == []
        kinds: Counter[str] = Counter()
        for raw in client.scan_iter(f"{keys.prefix}*", count=5000):
            name = raw.decode()
            kind = re.split(r"[:]", name.removeprefix(keys.prefix))[0]
            kinds[kind] += 1
            if kind in {"done", "reply", "dedup", "worker", "lease"}:
                assert client.pttl(raw) != -1, f"{name} would stay for ever"
        assert set(kinds) <= EXPECTED_KINDS, kinds
    note("keys: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))


@pytest.mark.timeout(120)
async def test_nothing_but_documented_keys_stays(default_server, queue_name, tmp_path) -> None:
    await soak(default_server, queue_name, tmp_path, 2000)
    check_keys(default_server, queue_name)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_memory_stays_flat_over_50000_jobs(start_server, queue_name, tmp_path) -> None:
    server = start_server("valkey-9.1")
    sizes = await soak(server, queue_name, tmp_path, 50_000)
    fifth = len(sizes) // 5
    growth = {}
    for number, name in enumerate(("worker", "engine")):
        second = mean(size[number] for size in sizes[fifth : 2 * fifth])
        last = mean(size[number] for size in sizes[-fifth:])
        growth[name] = last / second - 1
        note(f"{name}: {second:.1f} MB in the second fifth, {last:.1f} MB in the last, {growth[name]:+.2%}")
    check_keys(server, queue_name)
    assert max(growth.values()) < 0.02
