"""Chaos: random faults over a stream of jobs, and a checker that knows what every job's answer must be.

The world is one real server with an fsync on every write, behind a proxy that can break connections, and a few real
worker processes with real engine children. The ledger notes every job whose submit was acknowledged. When the faults
are over and the queue has had time to settle, the checker reads the reply streams past the client and counts

    lost         acknowledged, and the queue has neither the job nor an answer
    twice        more than one `done` entry in its reply stream
    stuck        still somewhere in the queue
    wrong        an answer that is not this job's text, or that is no success
    left_over    keys that no finished job should leave behind
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from edgellm_producer import Producer
from edgellm_producer.errors import EdgellmError
from edgellm_producer.keys import GROUP, Keys
from edgellm_producer.wire import Status, decode_reply
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisServer

NUM_WORKERS = 3
TOKENS = 8
LEASE_S = 1.0
SETTLE_S = 60.0
HOLD_S = 20.0
SCRIPT = Path(__file__).with_name("chaos_worker.py")


@dataclass
class Verdict:
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.twice or self.stuck or self.wrong or self.left_over)

    def __str__(self) -> str:
        rows = (("lost", self.lost), ("twice", self.twice), ("stuck", self.stuck), ("wrong", self.wrong))
        return ", ".join(f"{len(ids)} {name}" for name, ids in (*rows, ("left over", self.left_over)))


class World:
    """Everything that can be hurt. `log` says what was done to whom."""

    def __init__(self, server: RedisServer, proxy: Proxy, queue: str, rng: random.Random, env: dict[str, str]) -> None:
        self.log = Path(tempfile.mkdtemp(prefix="edgellm-chaos-")) / "workers.log"
        self.server = server
        self.proxy = proxy
        self.queue = queue
        self.rng = rng
        self.env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path_of_workers()} | env
        self.workers: list[asyncio.subprocess.Process] = []
        self.faults: Counter[str] = Counter()
        self.pace_s = 0.0

    async def start_worker(self) -> asyncio.subprocess.Process:
        # Its clock may be told to step before it listens: the signal is ignored until then.
        command = ("sh", "-c", 'trap "" USR1; exec "$@"', "sh", sys.executable, str(SCRIPT), self.proxy.url, self.queue)
        with self.log.open("a") as log:
            return await asyncio.create_subprocess_exec(*command, env=self.env, stdout=log, stderr=log)

    async def replace(self, index: int) -> None:
        """After a fault that ends a worker."""
        await self.workers[index].wait()
        self.workers[index] = await self.start_worker()

    def pick(self) -> int:
        """A worker to hurt. None may have ended by itself: a worker outlives everything but its own death."""
        dead = [worker.returncode for worker in self.workers if worker.returncode is not None]
        assert not dead, f"a worker ended by itself with {dead}: {self.log.read_text()[-4000:]}"
        return self.rng.randrange(len(self.workers))

    async def stop(self) -> None:
        for worker in self.workers:
            if worker.returncode is None:
                worker.send_signal(signal.SIGCONT)
                worker.kill()
                await worker.wait()


def path_of_workers() -> str:
    """Where they find this package's tests; and the product, where that is not the installed one."""
    return os.pathsep.join((str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")))


async def kill_worker(world: World) -> None:
    index = world.pick()
    world.workers[index].kill()
    await world.replace(index)


async def drain_worker(world: World) -> None:
    index = world.pick()
    world.workers[index].send_signal(signal.SIGTERM)
    await world.replace(index)


async def kill_engine(world: World) -> None:
    for pid in children_of(world.workers[world.pick()].pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def stop_worker_past_its_lease(world: World) -> None:
    worker = world.workers[world.pick()]
    worker.send_signal(signal.SIGSTOP)
    await asyncio.sleep(LEASE_S * world.rng.uniform(1.3, 2.5))
    worker.send_signal(signal.SIGCONT)


async def stop_worker_until_others_answered(world: World) -> None:
    """What the fence is there for: a worker that holds jobs, stopped until another has answered one of them. However slow
    the machine is, so that the mutant is always put to the test.
    """
    deadline = time.monotonic() + HOLD_S
    with world.server.client() as client:
        while time.monotonic() < deadline:
            worker = world.workers[world.pick()]
            worker.send_signal(signal.SIGSTOP)
            held = jobs_held_by(client, Keys(world.queue), worker.pid)
            while held and time.monotonic() < deadline and not is_any_answered(client, Keys(world.queue), held):
                await asyncio.sleep(0.02)
            worker.send_signal(signal.SIGCONT)
            if held:
                return
            await asyncio.sleep(0.05)


async def step_clock(world: World) -> None:
    world.workers[world.pick()].send_signal(signal.SIGUSR1)


async def kill_server(world: World) -> None:
    await asyncio.to_thread(world.server.kill)
    await asyncio.sleep(world.rng.uniform(0.0, 0.5))
    await asyncio.to_thread(world.server.start)


async def pause_server(world: World) -> None:
    world.server.pause()
    await asyncio.sleep(world.rng.uniform(0.2, 1.5))
    world.server.resume()


async def cut_network(world: World) -> None:
    world.proxy.refuse = True
    for _ in range(world.rng.randint(1, 3)):
        world.proxy.cut()
        await asyncio.sleep(world.rng.uniform(0.0, 0.3))
    world.proxy.refuse = False


async def lose_a_reply(world: World) -> None:
    """The effect of a script stays, its reply does not arrive: between sending and receiving."""
    world.proxy.drop_next_reply(b"EVALSHA")


async def swallow_traffic(world: World) -> None:
    world.proxy.swallow = True
    await asyncio.sleep(world.rng.uniform(0.2, 1.0))
    world.proxy.swallow = False


FAULTS: tuple[Callable[[World], Awaitable[None]], ...] = (
    kill_worker,
    drain_worker,
    kill_engine,
    stop_worker_past_its_lease,
    step_clock,
    kill_server,
    pause_server,
    cut_network,
    lose_a_reply,
    swallow_traffic,
)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def jobs_held_by(client: redis.Redis, keys: Keys, pid: int) -> list[str]:
    """Ids of the jobs delivered to the worker of this process and not answered; its name has the process in it."""
    held: list[str] = []
    for lane in keys.lanes:
        with contextlib.suppress(redis.ResponseError):  # no group yet
            for entry in client.xpending_range(lane, GROUP, "-", "+", 1000):
                if f"-{pid}-" in entry["consumer"]:
                    held += [
                        fields["id"] for _, fields in client.xrange(lane, entry["message_id"], entry["message_id"])
                    ]
    return held


def is_any_answered(client: redis.Redis, keys: Keys, job_ids: list[str]) -> bool:
    return any(client.exists(keys.done(job_id)) for job_id in job_ids)


@asynccontextmanager
async def chaos_world(
    server: RedisServer, queue: str, rng: random.Random, env: dict[str, str] | None = None
) -> AsyncIterator[World]:
    proxy = Proxy(server.socket_path)
    await proxy.start()
    world = World(server, proxy, queue, rng, env or {})
    world.workers = [await world.start_worker() for _ in range(NUM_WORKERS)]
    try:
        yield world
    finally:
        await world.stop()
        await proxy.stop()


async def persistently(attempt: Callable[[], Awaitable[object]]) -> None:
    """What a producer does that must get its job in: the same id again until it is acknowledged."""
    while True:
        try:
            await attempt()
        except EdgellmError:
            await asyncio.sleep(0.05)
        else:
            return


def prompt_of(number: int) -> list[int]:
    return [1 + number % 90, 1 + number % 900]


async def submit_all(world: World, num_jobs: int, is_over: asyncio.Event) -> tuple[list[str], list[asyncio.Task[bool]]]:
    """Spread over the time of the faults; one in ten is also read as it comes, slowly."""
    acknowledged: list[str] = []
    readers: list[asyncio.Task[bool]] = []
    async with Producer(world.proxy.url, queue=world.queue, timeout_s=3.0) as producer:
        for number in range(num_jobs):
            job_id, priority = f"job-{number}", ("high", "normal", "low")[number % 3]
            fields = {"prompt_token_ids": prompt_of(number), "max_tokens": TOKENS, "ignore_eos": True}
            stream = number % 10 == 0
            await persistently(lambda: producer.submit(**fields, id=job_id, priority=priority, stream=stream))  # noqa: B023
            acknowledged.append(job_id)
            if stream:
                readers.append(asyncio.create_task(read_slowly(world, job_id)))
            if not is_over.is_set():
                await asyncio.sleep(world.rng.uniform(0.0, 2.0 * world.pace_s))
        await asyncio.gather(*readers)
    return acknowledged, readers


async def read_slowly(world: World, job_id: str) -> bool:
    """A reader of its own that is cut off like everybody else, and asks again."""
    while True:
        with contextlib.suppress(EdgellmError):
            async with Producer(world.proxy.url, queue=world.queue, timeout_s=3.0) as producer:
                text = ""
                async for event in producer.job(job_id).stream():
                    text += event.text
                    await asyncio.sleep(0.02)
                return True
        await asyncio.sleep(0.1)


async def run_chaos(world: World, *, num_jobs: int, num_faults: int, fault_every_s: float) -> Verdict:
    """Faults at random while jobs come; then quiet, then the verdict."""
    world.pace_s = num_faults * fault_every_s / num_jobs
    is_over = asyncio.Event()
    submitting = asyncio.create_task(submit_all(world, num_jobs, is_over))
    for _ in range(num_faults):
        await asyncio.sleep(fault_every_s * world.rng.uniform(0.3, 1.0))
        fault = world.rng.choice(FAULTS)
        world.faults[fault.__name__] += 1
        await fault(world)
    is_over.set()
    world.pick()
    acknowledged, _ = await submitting
    await settle(world, len(acknowledged))
    return judge(world, acknowledged)


async def settle(world: World, num_jobs: int) -> None:
    deadline = time.monotonic() + SETTLE_S
    with world.server.client() as client:
        while time.monotonic() < deadline:
            if sum(1 for _ in client.scan_iter(f"{Keys(world.queue).prefix}done:*", count=5000)) >= num_jobs:
                return
            await asyncio.sleep(0.2)


def judge(world: World, acknowledged: list[str]) -> Verdict:
    keys, verdict = Keys(world.queue), Verdict()
    with world.server.client(is_raw=True) as client:
        for job_id in acknowledged:
            answers = [fields[b"done"] for _, fields in client.xrange(keys.reply(job_id)) if b"done" in fields]
            if not answers:
                (verdict.stuck if client.exists(keys.job(job_id)) else verdict.lost).append(job_id)
                continue
            if len(answers) > 1:
                verdict.twice.append(job_id)
            reply = decode_reply(answers[0])
            last = prompt_of(int(job_id.removeprefix("job-")))[-1]
            if reply.status is not Status.OK or reply.token_ids != [last + n + 1 for n in range(TOKENS)]:
                verdict.wrong.append(f"{job_id} {reply.status} {reply.token_ids}")
        verdict.left_over = left_over(client, keys)
    return verdict


def left_over(client: redis.Redis, keys: Keys) -> list[str]:
    found = [key.decode() for kind in ("job", "cancel", "held") for key in client.scan_iter(f"{keys.prefix}{kind}:*")]
    found += [f"{lane}: {client.xlen(lane)} entries" for lane in keys.lanes if client.xlen(lane)]
    return found + [key for key in (keys.delayed, keys.deadlines, keys.checks) if client.exists(key)]
