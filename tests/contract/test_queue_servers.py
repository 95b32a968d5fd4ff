"""Servers that break: restarted, flushed, paused, full, demoted, at their limit of clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest

from edgellm_producer import QueueUnreachable, ResultTimeout, UnknownJob
from edgellm_producer.keys import GROUP
from edgellm_worker.queue.errors import QueueUnavailable
from tests.support.answering import answering, eventually
from tests.support.queue_rig import NORMAL, ids, ok, open_rig, until
from tests.support.redis_server import RedisServer

StartServer = Callable[..., RedisServer]


async def test_when_every_pooled_socket_is_dead_one_call_fails_and_no_job(
    start_server: StartServer, queue_name: str
) -> None:
    server = start_server(settings={"appendonly": "yes", "appendfsync": "always"})
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker()
        jobs = [await rig.submit(f"p{n}") for n in range(8)]
        deliveries = await worker.take(8)
        await asyncio.gather(*(worker.begin([delivery]) for delivery in deliveries))
        assert len(worker._link._commands._idle) > 3
        server.kill()
        server.start()
        with pytest.raises(QueueUnavailable):
            await worker.sweep()
        for delivery in deliveries:
            assert await worker.finish([ok(delivery, delivery.job.prompt or "")]) == [True]
        assert [(await job.result(timeout=5)).text for job in jobs] == [f"p{n}" for n in range(8)]


@pytest.mark.parametrize("version", ["valkey-9.1", "redis-7.0", "redis-6.2"])
async def test_flushall_under_load_ends_in_answers(start_server: StartServer, queue_name: str, version: str) -> None:
    """langfuse#15509: what was flushed is reported unknown, everything after is answered."""
    server = start_server(version)
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker(lease_s=0.5)
        async with answering(worker):
            waits = []
            for number in range(60):
                job = await rig.submit(f"p{number}")
                waits.append(asyncio.create_task(job.result(timeout=10)))
                if number == 30:
                    rig.admin.flushall()
                await asyncio.sleep(0.005)
            results = await asyncio.gather(*waits, return_exceptions=True)
        assert all(not isinstance(r, BaseException) or isinstance(r, (UnknownJob, ResultTimeout)) for r in results)
        assert not any(isinstance(r, BaseException) for r in results[31:]), "all that came after the flush"
        groups = rig.admin.xinfo_groups(rig.keys.lane(NORMAL))
        assert [(group["name"], group["pending"]) for group in groups] == [(GROUP, 0)]


@pytest.mark.parametrize("version", ["valkey-9.1", "redis-7.0", "redis-6.2"])
async def test_a_restarted_server_with_persistence_loses_nothing(
    start_server: StartServer, queue_name: str, version: str
) -> None:
    """arq#435: jobs wait and run while the server is killed."""
    server = start_server(version, settings={"appendonly": "yes", "appendfsync": "always"})
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker(lease_s=1.0)
        jobs = [await rig.submit(f"p{i}", timeout_s=60.0) for i in range(6)]
        running = await worker.take(3)
        await worker.begin(running)
        server.kill()
        with pytest.raises(QueueUnavailable):
            await worker.finish([ok(d, d.job.prompt or "") for d in running])
        server.start()
        assert await eventually(lambda: worker.finish([ok(d, d.job.prompt or "") for d in running])) == [True] * 3
        async with answering(worker):
            replies = [await job.result(timeout=10) for job in jobs]
        assert [reply.text for reply in replies] == [f"p{i}" for i in range(6)]
        assert {reply.attempt for reply in replies} == {1}


async def test_a_restarted_server_without_persistence_gets_the_answers_of_what_ran(
    start_server: StartServer, queue_name: str
) -> None:
    server = start_server()
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker()
        job = await rig.submit()
        (delivery,) = await worker.take(1)
        await worker.begin([delivery])
        server.kill()
        server.start()
        assert await eventually(lambda: worker.finish([ok(delivery)])) == [True]
        assert (await job.result(timeout=5)).text == "text"
        after = await rig.submit()
        assert ids(await eventually(lambda: worker.take(1))) == [after.id]  # type: ignore[arg-type]


async def test_a_paused_server_is_waited_for(start_server: StartServer, queue_name: str) -> None:
    server = start_server()
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker(command_timeout_s=0.3)
        await rig.submit()
        server.pause()
        with pytest.raises(QueueUnavailable):
            await worker.take(1)
        server.resume()
        assert len(await eventually(lambda: worker.take(1))) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["valkey-9.1", "redis-7.0", "redis-6.2"])
async def test_a_full_server_refuses_and_recovers(start_server: StartServer, queue_name: str, version: str) -> None:
    """mediforce#1359, and a reply store that refuses: nothing is acknowledged that could not be answered."""
    server = start_server(version)
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker()
        job = await rig.submit()
        (delivery,) = await worker.take(1)
        await worker.begin([delivery])
        rig.admin.config_set("maxmemory", 1)
        with pytest.raises(QueueUnreachable):
            await rig.submit()
        with pytest.raises(QueueUnavailable):
            await worker.finish([ok(delivery)])
        assert rig.admin.xlen(rig.keys.lane(NORMAL)) == 1
        assert not rig.admin.exists(rig.keys.done(job.id))
        rig.admin.config_set("maxmemory", 0)
        assert await worker.finish([ok(delivery)]) == [True]
        assert rig.answers(job.id) == 1


async def test_a_server_that_became_a_replica_is_read_only_until_it_is_not(
    start_server: StartServer, queue_name: str
) -> None:
    """redis-py#460."""
    server = start_server()
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker()
        await rig.submit()
        rig.admin.replicaof("127.0.0.1", "1")
        with pytest.raises(QueueUnavailable):
            await worker.take(1)
        rig.admin.replicaof("NO", "ONE")
        assert len(await eventually(lambda: worker.take(1))) == 1  # type: ignore[arg-type]


async def test_a_server_at_its_limit_of_clients_is_tried_again(start_server: StartServer, queue_name: str) -> None:
    """rq#1716: refused between one command and the next."""
    server = start_server(settings={"maxclients": "40"})
    async with open_rig(server, queue_name) as rig:
        worker = await rig.worker()
        await rig.submit()
        num_clients = rig.admin.info("clients")["connected_clients"]
        await worker._link._commands.close()
        await until(lambda: rig.admin.info("clients")["connected_clients"] < num_clients)
        with contextlib.ExitStack() as fillers:
            for _ in range(60):
                filler = fillers.enter_context(socket.socket(socket.AF_UNIX))
                filler.connect(server.socket_path)
            await until(lambda: rig.admin.info("clients")["connected_clients"] == 40)
            with pytest.raises(QueueUnavailable):
                await worker.take(1)
        assert len(await eventually(lambda: worker.take(1))) == 1  # type: ignore[arg-type]
