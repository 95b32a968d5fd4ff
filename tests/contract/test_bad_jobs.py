"""Whatever is in the stream gets its own answer or dead letter, and its neighbours finish, on every server."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgpack
import pytest

from edgellm_producer import Producer
from edgellm_producer.keys import ID_FIELD, JOB_FIELD, Keys, Priority
from edgellm_producer.wire import ErrorCode, Reply, Status
from edgellm_worker.daemon import Daemon, DaemonParts
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.daemons import config, metrics, model
from tests.support.fake_engine import FakeEngine
from tests.support.redis_server import wait_until

GOOD = {"v": 1, "prompt": "def f(", "max_tokens": 3}
NAMED = [
    ("no-prompt", {"v": 1}, ErrorCode.INVALID_FIELD),
    ("two-prompts", {**GOOD, "prompt_token_ids": [1]}, ErrorCode.INVALID_FIELD),
    ("hot", {**GOOD, "temperature": 1000.0}, ErrorCode.INVALID_FIELD),
    ("wrong-type", {**GOOD, "max_tokens": "many"}, ErrorCode.INVALID_FIELD),
    ("unknown-field", {**GOOD, "best_of": 3}, ErrorCode.UNSUPPORTED_FIELD),
    ("too-long", {**GOOD, "prompt": "word " * 400}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ("other-model", {**GOOD, "model": "other"}, ErrorCode.MODEL_NOT_FOUND),
]


@pytest.mark.timeout(60)
async def test_bad_entries_are_answered_and_neighbours_finish(server, queue_name):
    keys = Keys(queue_name)
    lane = keys.lane(Priority.NORMAL)
    queue = RedisQueue(QueueConfig(url=server.url, queue=queue_name, block_ms=100, lease_s=5.0))
    await queue.open()
    engine = FakeEngine(at_once=True)
    parts = DaemonParts(queue, engine, model(), metrics(engine.limits), time.monotonic)
    daemon = Daemon(parts, config())
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(queue.close)
        client = stack.enter_context(server.client(is_raw=True))
        client.xadd(lane, {JOB_FIELD: b"\xc1 not msgpack"})
        client.xadd(lane, {JOB_FIELD: b"\xc1", ID_FIELD: b"broken"})
        client.xadd(lane, {b"other": b"field"})
        for job_id, fields, _ in NAMED:
            client.xadd(lane, {JOB_FIELD: msgpack.packb({**fields, "id": job_id}), ID_FIELD: job_id.encode()})
        async with Producer(server.url, queue=queue_name) as producer:
            good = [await producer.submit(f"good {n}", max_tokens=3) for n in range(6)]
            running = asyncio.create_task(daemon.run())
            # A job that came by a bare XADD is known to the queue once a worker has read it.
            await asyncio.to_thread(wait_until, lambda: client.xlen(lane) == 0, "an empty lane")
            replies: dict[str, Reply] = {}
            for job_id in [*(name for name, _, _ in NAMED), "broken"]:
                replies[job_id] = await producer.job(job_id).reply(timeout=20)
            for job in good:
                assert (await job.reply(timeout=20)).status is Status.OK
            daemon.stop()
            await running
        for job_id, _, code in NAMED:
            error = replies[job_id].error
            assert error is not None
            assert (job_id, error.code) == (job_id, code)
            assert error.field, "the field is named"
        assert replies["broken"].status in {Status.REJECTED, Status.FAILED}
        dead = [fields for _, fields in client.xrange(keys.dead)]
        assert len(dead) >= 3, "what has no readable id can only be kept here"
