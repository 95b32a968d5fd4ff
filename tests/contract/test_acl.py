"""The users that `edgellm-worker acl` prints: they can do the whole job, and nothing can be taken from them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterator
from importlib.resources import files
from typing import Any, TypeVar

import pytest
import redis

from edgellm_producer import Delta, Job, Producer, QueueUnreachable, Reply, Status
from edgellm_producer.dead import DeadLetters
from edgellm_producer.errors import EdgellmError
from edgellm_producer.keys import GROUP, Keys
from edgellm_producer.wire import encode
from edgellm_worker.cli.main import main
from edgellm_worker.queue.api import Answer, Delivery
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.errors import QueueError
from edgellm_worker.queue.redis_queue import RedisQueue
from edgellm_worker.queue.rights import COMMANDS, Role
from tests.support.queue_rig import HIGH, NORMAL, ok, renewed, until
from tests.support.redis_server import VERSIONS, RedisServer

PASSWORD = "open sesame"
T = TypeVar("T")
SHA256 = "41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb"


def printed_users(capsys: pytest.CaptureFixture[str], queue: str, *flags: str) -> dict[str, list[str]]:
    """Name of each user and the rest of its line."""
    assert main(["acl", "--queue", queue, *flags], {}) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[1]: [word.replace("#SHA256", f"#{SHA256}") for word in words[2:]] for words in lines}


@pytest.fixture
def users(capsys: pytest.CaptureFixture[str], queue_name: str) -> dict[str, list[str]]:
    return printed_users(capsys, queue_name)


def url_of(server: RedisServer, user: str) -> str:
    return f"unix://{user}:open%20sesame@{server.socket_path}"


def grant(server: RedisServer, users: dict[str, list[str]], without: tuple[str, str] | None = None) -> None:
    """Make the users as printed; `without` is a user and a command that it does not get."""
    with server.client() as admin:
        for user, words in users.items():
            left = [word for word in words if without is None or (user, word) != (without[0], f"+{without[1]}")]
            admin.execute_command("ACL", "SETUSER", user, "reset", *left)
        admin.execute_command("ACL", "LOG", "RESET")
        admin.script_flush()


def refusals(server: RedisServer) -> list[str]:
    with server.client() as admin:
        return [f"{entry['username']} {entry['object']}" for entry in admin.acl_log()]


class Trial:
    """One worker (and a second one, to take over) and one producer under the printed users."""

    def __init__(self, server: RedisServer, queue: str) -> None:
        self.server, self.queue, self.keys = server, queue, Keys(queue)
        self.producer = Producer(url_of(server, f"edgellm-producer-{queue}"), queue=queue)
        self.workers = [self._worker(name) for name in ("w1", "w2")]
        self._beside: list[asyncio.Task[Any]] = []

    def _worker(self, name: str) -> RedisQueue:
        url = url_of(self.server, f"edgellm-worker-{self.queue}")
        config = QueueConfig(url=url, queue=self.queue, consumer=name, block_ms=20, reclaim_interval_s=0, lease_s=1)
        return RedisQueue(config)

    async def everything(self) -> None:
        """Every transition of the table; each step says by its result that it was done."""
        for worker in self.workers:
            await worker.open()
        with self.server.client() as admin:
            for step in (self.answered, self.tenants, self.cancelled, self.retried, self.handed_over, self.swept):
                await step(admin)
        await self.subscribed()

    def beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs beside the steps; `close` waits for it whatever became of the step that wanted its result."""
        task = asyncio.create_task(work)
        self._beside.append(task)
        return task

    async def close(self) -> None:
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for worker in self.workers:
            if worker._is_open:
                await worker.close()
            else:
                await worker._link.close()
        await self.producer.close()

    async def take(self, count: int, worker: int = 0) -> list[Delivery]:
        deliveries = await self.workers[worker].take(count)
        assert len(deliveries) == count
        return deliveries

    async def answered(self, admin: redis.Redis) -> None:
        """Submit, wait, take, begin, stream, finish, read; an idempotency key; a stranger at the reply's key."""
        waiting = self.beside(self.workers[0].wait(5))
        job = await self.producer.submit("a", stream=True, idempotency_key="k", timeout_s=60.0)
        await waiting
        (delivery,) = await self.take(1)
        await self.workers[0].begin([delivery])
        reading = self.beside(job.result(timeout=2))
        await asyncio.sleep(0.02)
        other = await self.producer.submit("b", priority="high")
        reading_other = self.beside(other.result(timeout=2))
        admin.set(self.keys.reply(other.id), "squatter")
        assert await self.workers[0].append(delivery, Delta(attempt=1, offset_tokens=0, text="te", token_ids=[1]))
        (second,) = await self.take(1)
        assert await self.workers[0].finish([ok(delivery), ok(second)]) == [True, True]
        assert [(await reading).status, (await reading_other).status] == [Status.OK] * 2
        assert (await job.status()).status is Status.OK
        assert (await self.producer.submit("a", stream=True, idempotency_key="k", timeout_s=60.0)).is_duplicate

    async def tenants(self, admin: redis.Redis) -> None:
        admin.hset(self.keys.config, "tenant_max_jobs", 100)
        jobs = await self.producer.submit_many([{"prompt": "x", "tenant": "t"} for _ in range(66)])
        admin.zadd(self.keys.checks, {job.id: 1 for job in jobs})
        await self.workers[0].sweep()
        await jobs[-1].cancel()
        await jobs[0].cancel()
        for delivery in await self.take(64):
            await self.workers[0].finish([ok(delivery)])
        assert (await self.workers[0].stats()).held == 0
        admin.delete(self.keys.config)

    async def cancelled(self, admin: redis.Redis) -> None:
        """While it waits, while it runs, while it is delayed."""
        waits = await self.producer.submit("w", idempotency_key="freed", timeout_s=60.0)
        admin.set(self.keys.reply(waits.id), "squatter")
        assert await waits.cancel() == "cancelled"
        runs = await self.producer.submit("r")
        (delivery,) = await self.take(1)
        await self.workers[0].begin([delivery])
        assert await runs.cancel() == "requested"
        await self.workers[0].sweep()
        assert runs.id in self.workers[0].cancelled()
        await self.workers[0].retry(delivery, delay_s=60, reason="test", solo_kill=True)
        assert await runs.cancel() == "cancelled"
        assert admin.zcard(self.keys.delayed) == 0

    async def retried(self, admin: redis.Redis) -> None:
        """A retry, a dead letter, another life; what nobody can decode; a bare XADD."""
        job = await self.producer.submit("r")
        (delivery,) = await self.take(1)
        await self.workers[0].begin([delivery])
        await self.workers[0].retry(delivery, delay_s=0, reason="test")
        await self.workers[0].sweep()
        (again,) = await self.take(1)
        failed = Reply(id=job.id, status=Status.FAILED)
        assert await self.workers[0].finish([Answer(again, failed, dead_reason="poison")]) == [True]
        letters = [letter async for letter in DeadLetters(self.producer)]
        assert [letter.reason for letter in letters] == ["poison"]
        await DeadLetters(self.producer).retry(letters[0].entry_id)
        await self.workers[0].finish([ok(d) for d in await self.take(1)])
        admin.xadd(self.keys.lane(NORMAL), {"job": b"\xc1"})
        bare = Job(id="bare", prompt="x", tenant="t", timeout_s=60.0)
        admin.xadd(self.keys.lane(NORMAL), {"job": encode(bare)})
        await until(lambda: admin.xlen(self.keys.lane(NORMAL)) == 2)
        await self.workers[0].finish([ok(d) for d in await self.workers[0].take(2)])
        assert admin.xlen(self.keys.lane(NORMAL)) == 0

    async def handed_over(self, admin: redis.Redis) -> None:
        """Release, reclaim, renew, a group that is gone, an entry that is gone."""
        await self.producer.submit("h", priority="high")
        (delivery,) = await self.take(1)
        await self.workers[0].begin([delivery])
        await self.workers[0].release([delivery], begun=True)
        (mine,) = await self.take(1, worker=1)
        await renewed(self.workers[1])
        admin.xclaim(self.keys.lane(HIGH), GROUP, "w9", 0, [mine.entry_id], idle=3_600_000, justid=True)
        (back,) = await self.take(1)
        assert self.workers[0].counters.num_reclaimed >= 1
        await self.workers[0].finish([ok(back)])
        entry = admin.xadd(self.keys.lane(HIGH), {"job": b""})
        admin.xreadgroup(GROUP, "w9", {self.keys.lane(HIGH): ">"})
        admin.xdel(self.keys.lane(HIGH), entry)
        admin.xclaim(self.keys.lane(HIGH), GROUP, "w9", 0, [entry], idle=3_600_000, justid=True)
        await self.workers[0].take(1)
        admin.xgroup_destroy(self.keys.lane(HIGH), GROUP)
        await self.workers[0].take(1)

    async def swept(self, admin: redis.Redis) -> None:
        """Expired while it waits, while it is delayed, while its tenant is held back; a consumer that is gone."""
        late = await self.producer.submit("l", timeout_s=0.1)
        (delivery,) = await self.take(1)
        await self.workers[0].retry(delivery, delay_s=60, reason="test")
        crowd = [{"prompt": "x", "tenant": "u", "timeout_s": None if n < 64 else 0.1} for n in range(65)]
        jobs = [late, (await self.producer.submit_many(crowd))[-1], await self.producer.submit("l", timeout_s=0.1)]
        admin.xgroup_createconsumer(self.keys.lane(NORMAL), GROUP, "gone")
        await asyncio.sleep(0.12)
        await self.workers[0].sweep()
        assert [(await job.reply(timeout=2)).status for job in jobs] == [Status.EXPIRED] * 3
        assert "gone" not in [c["name"] for c in admin.xinfo_consumers(self.keys.lane(NORMAL), GROUP)]

    async def subscribed(self) -> None:
        with self.server.client() as admin:
            await until(lambda: admin.pubsub_numsub(self.keys.events)[0][1] == 2 or refusals(self.server))


async def attempt(server: RedisServer, queue: str) -> Exception | None:
    trial = Trial(server, queue)
    try:
        async with asyncio.timeout(20):
            await trial.everything()
    except (AssertionError, EdgellmError, QueueError, TimeoutError) as error:
        return error
    finally:
        await trial.close()
        with server.client() as admin:
            for key in admin.scan_iter(trial.keys.prefix + "*", count=1000):
                admin.delete(key)
    return None


async def test_the_printed_users_can_do_the_whole_job(server: RedisServer, queue_name: str, users) -> None:
    grant(server, users)
    error = await attempt(server, queue_name)
    assert refusals(server) == []
    if error is not None:
        raise error


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", list(Role))
async def test_every_printed_command_is_needed(
    default_server: RedisServer, queue_name: str, users, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    monkeypatch.setattr("edgellm_worker.queue.preflight.PROBES", ())  # it would find out at the start
    user, needless = f"edgellm-{role}-{queue_name}", []
    for command in COMMANDS[role]:
        grant(default_server, users, without=(user, command))
        await attempt(default_server, queue_name)
        if not any(entry.split()[0] == user and command in entry.lower() for entry in refusals(default_server)):
            needless.append(command)
    assert needless == []


def commands_of(package: str) -> Iterator[str]:
    for script in files(package).joinpath("lua").iterdir():
        text = script.read_text(encoding="utf-8")
        for command, first in re.findall(r"\bp?call\('([A-Z]+)'(?:, '([A-Z]+)')?", text):
            yield (f"{command}|{first}" if command in {"XGROUP", "XINFO"} else command).lower()


def test_nothing_a_script_calls_was_forgotten() -> None:
    everything = {*COMMANDS[Role.WORKER], *COMMANDS[Role.PRODUCER]}
    called = {*commands_of("edgellm_producer"), *commands_of("edgellm_worker.queue")}
    assert called - everything == set()
    assert len(called) > 30


@pytest.mark.parametrize("version", VERSIONS)
def test_the_users_see_nothing_else(start_server, users, queue_name: str, version: str) -> None:
    server = start_server(version)
    grant(server, users)
    for user in users:
        with redis.Redis(unix_socket_path=server.socket_path, username=user, password=PASSWORD) as client:
            for words in (("GET", "edgellm:{other}:x"), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("FLUSHALL",)):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*words)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.eval("return redis.call('GET', KEYS[1])", 1, "edgellm:{other}:x")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_lines_are_those_of_an_aclfile(start_server, capsys, queue_name: str, version: str, tmp_path) -> None:
    path = tmp_path / "users.acl"
    path.write_text("user default on nopass ~* &* +@all\n")
    server = start_server(version, settings={"aclfile": str(path)})
    users = printed_users(capsys, queue_name)
    lines = [f"user {user} {' '.join(words)}\n" for user, words in users.items()]
    path.write_text("user default on nopass ~* &* +@all\n" + "".join(lines))
    with server.client() as admin:
        admin.execute_command("ACL", "LOAD")
        assert set(users) <= set(admin.acl_users())


async def test_a_user_without_rights_is_told_so(default_server: RedisServer, queue_name: str, users) -> None:
    worker = f"edgellm-worker-{queue_name}"
    grant(default_server, users, without=(worker, "evalsha"))
    async with Producer(url_of(default_server, worker), queue=queue_name) as producer:
        with pytest.raises(QueueUnreachable, match="evalsha"):
            await producer.submit("x")
