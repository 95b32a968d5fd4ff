"""Reports from other queues that concern a whole client and worker, not one transition."""

from __future__ import annotations

import asyncio

from edgellm_producer import Producer
from edgellm_producer.wire import Status
from tests.support.instant_worker import instant_worker
from tests.support.proxy import proxy_to


async def test_150_jobs_at_once_on_a_small_worker_are_all_answered(default_server, queue_name):
    """NeMo-Retriever#1551: far more jobs at once than places, none starves or is forgotten."""
    async with (
        instant_worker(default_server.url, queue_name, batch=2),
        Producer(default_server.url, queue=queue_name) as producer,
    ):
        jobs = await producer.submit_many({"prompt": f"job {n}"} for n in range(150))
        replies = await asyncio.gather(*(job.result(timeout=60) for job in jobs))
    assert [reply.text for reply in replies] == [f"JOB {n}" for n in range(150)]


async def test_a_failed_poll_while_waiting_is_not_the_end_of_the_wait(default_server, queue_name):
    """taskiq#655: the connection breaks, several times, while a result is waited for; the result still comes."""
    async with (
        proxy_to(default_server.socket_path) as proxy,
        Producer(proxy.url, queue=queue_name) as producer,
    ):
        job = await producer.submit("slow")
        waiting = asyncio.create_task(job.result(timeout=60))
        for _ in range(3):
            await asyncio.sleep(0.1)
            proxy.cut()
        async with instant_worker(default_server.url, queue_name):
            assert (await waiting).text == "SLOW"


async def test_the_protocol_is_ours_whatever_the_url_says(default_server, queue_name):
    """redis-py#4052: replies come in one shape only, so that a URL's `protocol` cannot change what a batch is."""
    for protocol in (2, 3):
        url = f"{default_server.url}?protocol={protocol}"
        async with instant_worker(url, queue_name), Producer(url, queue=queue_name) as producer:
            jobs = await producer.submit_many({"prompt": f"{protocol} {n}", "stream": True} for n in range(5))
            replies = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
        assert {reply.status for reply in replies} == {Status.OK}
        assert [reply.text for reply in replies] == [f"{protocol} {n}" for n in range(5)]
