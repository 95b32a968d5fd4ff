"""One idempotency key under many submitters at once: one job, whoever comes first, and one answer for all."""

from __future__ import annotations

import asyncio

from edgellm_producer import JobRejected, Producer
from edgellm_producer.keys import Priority
from tests.support.instant_worker import echo, instant_worker
from tests.support.redis_server import RedisServer

NUM_SUBMITTERS = 50


async def test_fifty_submitters_of_one_key_make_one_job(server: RedisServer, queue_name: str):
    """Each has a client, and so a connection, of its own; all of them get the answer."""
    producers = [Producer(server.url, queue=queue_name) for _ in range(NUM_SUBMITTERS)]
    num_run = 0

    def answer(delivery):
        nonlocal num_run
        num_run += 1
        return echo(delivery)

    try:
        jobs = await asyncio.gather(*(one.submit("the same", idempotency_key="order-17") for one in producers))
        assert len({job.id for job in jobs}) == 1
        assert sum(not job.is_duplicate for job in jobs) == 1
        assert await producers[0].call("XLEN", producers[0].keys.lane(Priority.NORMAL)) == 1
        async with instant_worker(server.url, queue_name, answer):
            replies = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
        assert {reply.text for reply in replies} == {"THE SAME"}
        assert num_run == 1
    finally:
        await asyncio.gather(*(one.close() for one in producers))


async def test_of_fifty_bodies_under_one_key_one_wins_and_the_others_are_told(server: RedisServer, queue_name: str):
    async with Producer(server.url, queue=queue_name) as producer:
        outcomes = await asyncio.gather(
            *(producer.submit(f"body {number}", idempotency_key="order-18") for number in range(NUM_SUBMITTERS)),
            return_exceptions=True,
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, JobRejected)]
        assert len(refused) == NUM_SUBMITTERS - 1
        assert {(error.code, error.field) for error in refused} == {("idempotency_conflict", "idempotency_key")}
        assert await producer.call("XLEN", producer.keys.lane(Priority.NORMAL)) == 1
