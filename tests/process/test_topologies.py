"""Behind Sentinel and on a Cluster, with real processes: the main job, and what happens when the server changes."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from edgellm_producer import Producer, QueueUnreachable, ResultTimeout, UnknownJob
from edgellm_producer.keys import GROUP
from edgellm_worker.queue.api import BeginOutcome
from edgellm_worker.queue.errors import QueueUnavailable
from tests.support.answering import answering, eventually
from tests.support.queue_rig import NORMAL, Rig, ok, open_rig, renewed, until
from tests.support.redis_server import RedisServer, wait_until
from tests.support.topologies import SERVICE, Cluster, Sentinel, replicated

pytestmark = pytest.mark.xdist_group("faults")

StartServer = Callable[..., RedisServer]
VERSIONS = ("valkey-9.1", "redis-7.0")


def sentinel_url(*sentinels: Sentinel) -> str:
    return "redis+sentinel://" + ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels) + f"/{SERVICE}?db=0"


def wait_for_copy(server: RedisServer) -> None:
    """All that was written so far is on the replica too."""
    with server.client() as client:
        assert client.wait(1, 5000) == 1


@pytest.fixture
def cluster(start_server: StartServer) -> Iterator[Cluster]:
    started = Cluster(start_server, "valkey-9.1")
    yield started
    started.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_jobs_of_a_killed_master_are_answered_after_the_failover(
    start_server: StartServer, queue_name: str, tmp_path, version: str
) -> None:
    """taskiq-redis#130, for what waits, what runs, and what ran on a worker that is gone; the fence holds."""
    master, replica = replicated(start_server, version)
    with Sentinel(tmp_path, version, master.port) as sentinel:
        sentinel.wait_for_replica()
        async with open_rig(master, queue_name, url=sentinel_url(sentinel)) as rig:
            worker, dying = await rig.worker("w1", lease_s=1.0), await rig.worker("w2", lease_s=1.0)
            jobs = [await rig.submit(f"p{number}", stream=number % 2 == 0) for number in range(8)]
            running = await worker.take(2)
            abandoned = await dying.take(2)
            await worker.begin(running)
            await dying.begin(abandoned)
            dying.forget(abandoned)
            await asyncio.to_thread(wait_for_copy, master)
            reading = [asyncio.create_task(job.result(timeout=30)) for job in jobs]
            master.kill()
            with pytest.raises(QueueUnavailable):
                await worker.finish([ok(d, d.job.prompt or "") for d in running])
            assert (
                await eventually(lambda: worker.finish([ok(d, d.job.prompt or "") for d in running]), 20) == [True] * 2
            )
            async with answering(worker):
                replies = await asyncio.gather(*reading)
            assert [reply.text for reply in replies] == [f"p{number}" for number in range(8)]
            assert sentinel.master_port() == replica.port
            assert await eventually(lambda: dying.finish([ok(d, "late") for d in abandoned])) == [False] * 2
            with replica.client() as client:
                assert client.xlen(rig.keys.lane(NORMAL)) == 0
                assert client.xpending(rig.keys.lane(NORMAL), GROUP)["pending"] == 0
            await renewed(worker)
            await until(lambda: worker._listener._task is not None and not worker._listener._task.done())


async def test_an_answer_that_the_failover_lost_is_given_again(
    start_server: StartServer, queue_name: str, tmp_path
) -> None:
    """redis#5433: the window of asynchronous replication. The job runs twice, and each server showed one answer."""
    master, replica = replicated(start_server, "valkey-9.1")
    with Sentinel(tmp_path, "valkey-9.1", master.port) as sentinel:
        sentinel.wait_for_replica()
        async with open_rig(master, queue_name, url=sentinel_url(sentinel)) as rig:
            worker = await rig.worker(lease_s=1.0)
            job = await rig.submit("once")
            (delivery,) = await worker.take(1)
            await worker.begin([delivery])
            await asyncio.to_thread(wait_for_copy, master)
            replica.pause()
            with master.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "replica")
            assert await worker.finish([ok(delivery, "first")]) == [True]
            assert rig.answers(job.id) == 1
            master.kill()
            replica.resume()
            async with answering(worker):
                reply = await asyncio.wait_for(job.result(timeout=30), 30)
            assert (reply.text, reply.attempt) == ("once", 2)
            with replica.client(is_raw=True) as client:
                assert sum(b"done" in fields for _, fields in client.xrange(rig.keys.reply(job.id))) == 1


async def test_a_planned_failover_stops_nobody(start_server: StartServer, queue_name: str, tmp_path) -> None:
    """SENTINEL FAILOVER: the old master lives on as a replica and says READONLY."""
    master, replica = replicated(start_server, "valkey-9.1")
    password = secrets.token_hex(4)
    with Sentinel(tmp_path, "valkey-9.1", master.port, password) as sentinel:
        sentinel.wait_for_replica()
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/{SERVICE}?sentinel_password={password}"
        async with open_rig(master, queue_name, url=url) as rig:
            worker = await rig.worker()
            async with answering(worker):
                waits = []
                for number in range(40):
                    if number == 10:
                        sentinel._client.execute_command("SENTINEL", "FAILOVER", SERVICE)
                    waits.append(asyncio.create_task(submit_persistently(rig.producer, f"p{number}")))
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(wait_until, lambda: sentinel.master_port() == replica.port, "a new master")
                await asyncio.to_thread(wait_until, lambda: rig.admin.role()[0] == "slave", "the old one told so", 60.0)
                waits += [
                    asyncio.create_task(submit_persistently(rig.producer, f"p{number}")) for number in range(40, 50)
                ]
                texts = await asyncio.gather(*waits)
            assert texts == [f"p{number}" for number in range(50)]


async def submit_persistently(producer: Producer, prompt: str) -> str:
    """The same id again until it is acknowledged, as a failover may take what was."""
    job_id = f"job-{prompt}"
    while True:
        try:
            job = await producer.submit(prompt, id=job_id)
            return (await job.result(timeout=5)).text
        except (QueueUnreachable, ResultTimeout, UnknownJob):
            await asyncio.sleep(0.1)


async def main_job(rig: Rig) -> None:
    """Submit, stream, cancel, retry, reclaim, sweep, statistics."""
    worker, other = await rig.worker("w1", lease_s=1.0), await rig.worker("w2", lease_s=1.0)
    jobs = await rig.producer.submit_many([{"prompt": f"p{n}", "tenant": "t"} for n in range(70)])
    assert (await worker.stats()).held == 6
    assert await jobs[69].cancel() == "cancelled"
    taken = await worker.take(2)
    assert await worker.begin(taken) == [BeginOutcome.STARTED] * 2
    await worker.retry(taken[0], delay_s=0, reason="test")
    await worker.sweep()
    await worker.release(taken[1:], begun=True)
    async with answering(other):
        texts = [(await job.result(timeout=20)).text for job in jobs[:69]]
    assert texts == [f"p{n}" for n in range(69)]
    await renewed(worker)


async def test_the_main_job_on_a_cluster(cluster: Cluster, queue_name: str) -> None:
    """Three queues on three nodes, and a queue whose slot moves to another node."""
    queues = [f"{queue_name}-{number}" for number in range(30)]
    by_owner = {cluster.owner_of(f"{{{queue}}}"): queue for queue in queues}
    assert set(by_owner) == {0, 1, 2}
    for owner, queue in by_owner.items():
        async with open_rig(cluster.nodes[owner], queue, url=cluster.url) as rig:
            await main_job(rig)
            assert rig.other_keys() == set()
    queue = by_owner[0]
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig(cluster.nodes[1], queue, url=cluster.url))
        worker = await rig.worker("w3", lease_s=1.0)
        jobs = [await rig.submit(f"p{n}") for n in range(6)]
        running = await worker.take(2)
        await worker.begin(running)
        reading = asyncio.create_task(jobs[0].result(timeout=20))
        await asyncio.to_thread(cluster.move, f"{{{queue}}}", 1)
        done = await eventually(lambda: worker.finish([ok(d, d.job.prompt or "") for d in running]))
        assert done == [True] * 2
        async with answering(worker):
            assert [(await job.result(timeout=20)).text for job in jobs] == [f"p{n}" for n in range(6)]
        assert (await reading).text == "p0"
        await renewed(worker)
        assert rig.other_keys() == set()


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_slot_that_moves_again_and_again_loses_nothing(cluster: Cluster, queue_name: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    async with open_rig(cluster.nodes[0], queue_name, url=cluster.url) as rig:
        worker = await rig.worker(lease_s=2.0)
        async with answering(worker):
            waits = []
            for number in range(1000):
                waits.append(asyncio.create_task(submit_persistently(rig.producer, f"p{number}")))
                if number % 50 == 49:
                    owner = cluster.owner_of(f"{{{queue_name}}}")
                    to = dice.choice([node for node in range(3) if node != owner])
                    await asyncio.to_thread(cluster.move, f"{{{queue_name}}}", to)
                await asyncio.sleep(0.01)
            assert await asyncio.gather(*waits) == [f"p{number}" for number in range(1000)]


async def test_a_loading_server_is_waited_for(start_server: StartServer, queue_name: str) -> None:
    """LOADING: connected and refused, for as long as the server reads its file."""
    server = start_server("redis-7.0", settings={"appendonly": "yes", "key-load-delay": "3000"})
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker()
        job = await rig.submit("x")
        for number in range(300):
            rig.admin.set(f"filler-{number}", "x")
        server.kill()
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        async with answering(worker):
            assert (await job.result(timeout=20)).text == "x"
        await starting


@pytest.mark.parametrize("version", [*VERSIONS, "redis-6.2"])
async def test_a_server_that_says_readonly_is_left_at_once(
    start_server: StartServer, queue_name: str, version: str
) -> None:
    """redis-py#460: a demoted master that closes nothing: the next connection asks anew who is in charge. The blocked read
    takes nothing, so no server ends it with "instance state changed".
    """
    server = start_server(version)
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker(block_ms=1000)
        await worker.take(1)
        blocked = worker._waiter.reading(["0-0"] * 3)
        await until(lambda: any(client["cmd"] == "xread" for client in rig.admin.client_list()))
        await rig.submit()
        assert worker._link._commands._idle
        rig.admin.replicaof("127.0.0.1", "1")
        await blocked
        assert len(worker._waiter._commands._idle) == 1, "its connection was not broken"
        with pytest.raises(QueueUnavailable, match=r"(?i)read.?only"):
            await worker.take(1)
        assert worker._link._commands._idle == []
        rig.admin.replicaof("NO", "ONE")
