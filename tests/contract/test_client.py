"""The client against a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from edgellm_producer import (
    BlockingProducer,
    Delta,
    JobFailed,
    JobRejected,
    JobState,
    Producer,
    QueueUnreachable,
    Reply,
    Restarted,
    ResultExpired,
    ResultTimeout,
    Status,
    UnknownJob,
)
from edgellm_producer.job import JobStatus
from edgellm_worker.queue.api import Answer, Delivery
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.proxy import proxy_to
from tests.support.queue_rig import Rig, open_rig
from tests.support.redis_server import RedisServer


@asynccontextmanager
async def serving(worker: RedisQueue) -> AsyncIterator[None]:
    """An engine that returns at once: the text is the prompt, in pieces of one letter where the job streams."""
    closing = False

    async def serve() -> None:
        while not closing:
            deliveries = await worker.take(64)
            if not deliveries:
                await worker.wait(0.1)
                continue
            await worker.begin(deliveries)
            for delivery in deliveries:
                await stream(worker, delivery)
            await worker.finish([answer(delivery) for delivery in deliveries])

    task = asyncio.create_task(serve())
    try:
        yield
    finally:
        closing = True
        await task


async def stream(worker: RedisQueue, delivery: Delivery) -> None:
    if delivery.job.stream:
        for i, letter in enumerate(delivery.job.prompt or ""):
            await worker.append(delivery, Delta(attempt=1, offset_tokens=i, text=letter, token_ids=[ord(letter)]))


def answer(delivery: Delivery) -> Answer:
    text = delivery.job.prompt or ""
    status = Status.FAILED if text == "fail" else Status.OK
    tokens = [ord(letter) for letter in text]
    return Answer(delivery, Reply(id=delivery.id, status=status, text=text, token_ids=tokens, attempt=1))


async def test_stream_result_and_late_readers_see_the_same(rig: Rig) -> None:
    async with serving(await rig.worker()):
        job = await rig.submit("abc", stream=True)
        pieces = [event async for event in job.stream()]
        assert [piece.text for piece in pieces] == ["a", "b", "c"]
        assert (await job.result(timeout=5)).text == "abc"
        late = rig.producer.job(job.id)
        assert [event.text async for event in late.stream()] == ["a", "b", "c"]
        status = await late.status()
        assert (status.state, status.status, status.has_reply) == (JobState.DONE, Status.OK, True)


async def test_a_job_without_streaming_comes_in_one_piece(one_rig: Rig) -> None:
    async with serving(await one_rig.worker()):
        job = await one_rig.submit("abc")
        assert [event.text async for event in job.stream()] == ["abc"]


async def test_a_failed_job_raises_with_its_reply(one_rig: Rig) -> None:
    async with serving(await one_rig.worker()):
        job = await one_rig.submit("fail", stream=True)
        pieces = job.stream()
        assert [(await anext(pieces)).text for _ in "fail"] == [*"fail"]
        with pytest.raises(JobFailed) as caught:
            await anext(pieces)
        assert caught.value.reply == await job.reply()


async def test_a_wait_that_times_out_leaves_the_job_alive(one_rig: Rig) -> None:
    job = await one_rig.submit("abc")
    with pytest.raises(ResultTimeout):
        await job.result(timeout=0.01)
    async with serving(await one_rig.worker()):
        assert (await job.result(timeout=5)).text == "abc"


async def test_a_wait_where_no_worker_lives_says_so(one_rig: Rig) -> None:
    job = await one_rig.submit("abc")
    assert not await one_rig.producer.has_worker()
    with pytest.raises(ResultTimeout, match=f"no worker serves queue '{one_rig.producer.keys.queue}' there"):
        await job.result(timeout=0.01)
    worker = await one_rig.worker()
    assert await one_rig.producer.has_worker()
    with pytest.raises(ResultTimeout) as caught:
        await job.result(timeout=0.01)
    assert str(caught.value) == f"no answer of {job.id} within 0.01 s"
    async with serving(worker):
        assert (await job.result(timeout=5)).text == "abc"


async def test_not_ready_expired_and_unknown_are_three_answers(one_rig: Rig) -> None:
    """dramatiq#548: the client comes back after the reply's time."""
    with pytest.raises(UnknownJob):
        await one_rig.producer.job("never").result(timeout=5)
    waiting = await one_rig.submit("abc")
    with pytest.raises(ResultTimeout):
        await one_rig.producer.job(waiting.id).result(timeout=0.05)
    async with serving(await one_rig.worker()):
        await waiting.result(timeout=5)
    one_rig.admin.delete(one_rig.keys.reply(waiting.id))
    with pytest.raises(ResultExpired, match="ok"):
        await one_rig.producer.job(waiting.id).result(timeout=5)
    with pytest.raises(UnknownJob):
        await one_rig.producer.cancel("never")


async def test_the_replys_time_is_as_asked(one_rig: Rig) -> None:
    async with serving(await one_rig.worker()):
        job = await one_rig.submit("abc", reply_ttl_s=77)
        assert (await job.result(timeout=5)).reply_ttl_s == 77
    assert 70_000 < one_rig.admin.pttl(one_rig.keys.reply(job.id)) <= 77_000
    assert one_rig.admin.pttl(one_rig.keys.done(job.id)) > 23 * 3_600_000


async def test_many_waits_at_once_each_get_their_own(one_rig: Rig) -> None:
    async with serving(await one_rig.worker()):
        jobs = await one_rig.producer.submit_many([{"prompt": f"p{i}"} for i in range(1200)])
        replies = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
    assert [reply.text for reply in replies] == [f"p{i}" for i in range(1200)]


async def test_a_thousand_cancelled_waits_lose_no_reply(one_rig: Rig) -> None:
    """redis-py#2579."""
    jobs = await one_rig.producer.submit_many([{"prompt": f"p{i}"} for i in range(1000)])
    waits = [asyncio.create_task(job.result()) for job in jobs]
    await asyncio.sleep(0.05)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    async with serving(await one_rig.worker()):
        replies = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
    assert [reply.text for reply in replies] == [f"p{i}" for i in range(1000)]


async def test_commands_cancelled_in_flight_never_cross_replies(one_rig: Rig) -> None:
    """CVE-2023-28858."""
    jobs = await one_rig.producer.submit_many([{"prompt": "x", "id": f"j{i}"} for i in range(50)])
    for round_number in range(20):
        tasks = [asyncio.create_task(job.status()) for job in jobs]
        await asyncio.sleep(0.0005 * round_number)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for job, status in zip(jobs, done, strict=True):
            assert isinstance(status, asyncio.CancelledError) or status.id == job.id  # type: ignore[union-attr]
    statuses = await asyncio.gather(*(job.status() for job in jobs))
    assert {status.state for status in statuses} == {JobState.QUEUED}


async def test_a_second_attempt_is_not_shown_twice(one_rig: Rig) -> None:
    worker = await one_rig.worker()
    job = await one_rig.submit("abc", stream=True)

    async def read() -> list[Delta | Restarted]:
        return [event async for event in job.stream()]

    reading = asyncio.create_task(read())
    (delivery,) = await worker.take(1)
    await worker.begin([delivery])
    await worker.append(delivery, Delta(attempt=1, offset_tokens=0, text="ab", token_ids=[1, 2]))
    await worker.retry(delivery, delay_s=0, reason="engine died")
    await worker.sweep()
    (again,) = await worker.take(1)
    await worker.begin([again])
    await worker.append(again, Delta(attempt=2, offset_tokens=0, text="abc", token_ids=[1, 2, 3]))
    await worker.finish([Answer(again, Reply(id=job.id, status=Status.OK, text="abc", token_ids=[1, 2, 3], attempt=2))])
    assert [event.text for event in await reading] == ["ab", "c"]


async def test_a_stream_goes_on_after_its_connection_broke(server: RedisServer, queue_name: str, rig: Rig) -> None:
    worker = await rig.worker()
    async with (
        proxy_to(server.socket_path) as proxy,
        Producer(proxy.url, queue=rig.keys.queue) as producer,
    ):
        job = await producer.submit("abc", stream=True)
        (delivery,) = await worker.take(1)
        await worker.begin([delivery])
        pieces = job.stream()
        for offset, letter in enumerate("abc"):
            delta = Delta(attempt=1, offset_tokens=offset, text=letter, token_ids=[ord(letter)])
            await worker.append(delivery, delta)
            assert (await anext(pieces)).text == letter
            proxy.cut()
        await worker.finish([answer(delivery)])
        assert [event async for event in pieces] == []
        assert (await job.result(timeout=5)).text == "abc"


async def test_a_wait_outlives_a_restart_of_the_server(start_server, queue_name: str, monkeypatch) -> None:
    """The queue was asked for the job meanwhile, in vain."""
    monkeypatch.setattr("edgellm_producer.job.CHECK_AFTER_S", 0.01)
    server = start_server(settings={"appendonly": "yes", "appendfsync": "always"})
    asked_in_vain = asyncio.Event()
    ask = Producer.status

    async def status(producer: Producer, job_id: str) -> JobStatus:
        try:
            return await ask(producer, job_id)
        except QueueUnreachable:
            asked_in_vain.set()
            raise

    monkeypatch.setattr(Producer, "status", status)
    async with open_rig(server, queue_name) as rig:
        waiting = asyncio.create_task((await rig.submit("abc")).result(timeout=60))
        server.kill()
        async with asyncio.timeout(20):
            await asked_in_vain.wait()
        server.start()
        async with serving(await rig.worker()):
            assert (await waiting).text == "abc"


async def test_a_wait_ends_when_the_server_stays_away(start_server, queue_name: str, monkeypatch) -> None:
    monkeypatch.setattr("edgellm_producer.job.CHECK_AFTER_S", 0.01)
    monkeypatch.setattr("edgellm_producer.job.OUTAGE_S", 0.1)
    server = start_server()
    async with open_rig(server, queue_name) as rig:
        job = await rig.submit("abc")
        server.kill()
        with pytest.raises(QueueUnreachable):
            await job.result(timeout=60)


async def test_the_reader_of_a_reply_dies_and_another_reads_it(one_rig: Rig) -> None:
    """llm-d-async#423: readers do not consume."""
    async with serving(await one_rig.worker()):
        job = await one_rig.submit("abc")
        await job.result(timeout=5)
    async with Producer(one_rig.url, queue=one_rig.keys.queue) as other:
        assert (await other.job(job.id).result(timeout=5)).text == "abc"


async def test_a_submit_whose_reply_is_lost_makes_one_job(one_rig: Rig, default_server: RedisServer) -> None:
    async with proxy_to(default_server.socket_path) as proxy, Producer(proxy.url, queue=one_rig.keys.queue) as producer:
        await producer.submit("the server knows the script now")
        proxy.drop_next_reply(b"only-once")
        job = await producer.submit("only-once")
        assert proxy.num_dropped == 1
        assert one_rig.admin.xlen(one_rig.keys.lane("normal")) == 2  # type: ignore[arg-type]
        assert (await job.status()).state is JobState.QUEUED


async def test_map_yields_each_as_it_ends_and_stops_for_nothing(one_rig: Rig) -> None:
    one_rig.admin.hset(one_rig.keys.config, "max_jobs", 20)
    prompts = [{"prompt": "fail" if i == 5 else f"p{i}"} for i in range(100)] + [{"prompt": "x", "top_p": 9}]
    async with serving(await one_rig.worker()):
        outcomes = [outcome async for outcome in one_rig.producer.map(prompts, concurrency=30)]
    by_index = {outcome.index: outcome for outcome in outcomes}
    assert len(outcomes) == len(by_index) == 101
    assert isinstance(by_index[5].error, JobFailed)
    assert isinstance(by_index[100].error, JobRejected)
    assert all(by_index[i].reply.text == f"p{i}" for i in range(100) if i != 5)  # type: ignore[union-attr]


async def test_map_reads_its_input_only_as_fast_as_it_runs(one_rig: Rig) -> None:
    taken = 0

    def prompts() -> object:
        nonlocal taken
        for i in range(1000):
            taken = i + 1
            yield {"prompt": "x"}

    async with serving(await one_rig.worker()):
        outcomes = one_rig.producer.map(prompts(), concurrency=4)  # type: ignore[arg-type]
        await anext(outcomes)
        await outcomes.aclose()  # type: ignore[attr-defined]
    assert taken <= 4


async def test_no_server_is_queue_unreachable() -> None:
    async with Producer("unix:///nowhere/redis.sock") as producer:
        with pytest.raises(QueueUnreachable):
            await producer.submit("x")
    with pytest.raises(ValueError, match="queue"):
        Producer(queue="a:b")


async def test_the_blocking_front_does_the_same_and_is_shared_by_threads(one_rig: Rig) -> None:
    async with serving(await one_rig.worker()):
        texts = await asyncio.to_thread(use_blocking, one_rig)
    assert sorted(texts) == ["abc", "fail", "p0", "p1", "p2", "p3"]


def use_blocking(rig: Rig) -> list[str]:
    with BlockingProducer(rig.url, queue=rig.keys.queue) as producer:
        job = producer.submit("abc", stream=True)
        texts = ["".join(event.text for event in job.stream())]
        assert producer.job(job.id).result(timeout=5).text == "abc"
        assert producer.status(job.id).state is JobState.DONE
        assert job.cancel() == "done"
        texts += [o.reply.text if o.reply else "fail" for o in producer.map([{"prompt": "fail"}, {"prompt": "p0"}])]
        threads = [
            threading.Thread(target=lambda n=n: texts.append(producer.submit(f"p{n}").result(5).text))
            for n in (1, 2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return texts
