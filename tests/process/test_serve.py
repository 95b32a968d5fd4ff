"""Real workers, real producers, real signals: nothing lost, nothing answered twice."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from edgellm_producer import Producer
from edgellm_producer.job import JobState
from edgellm_producer.keys import Keys
from edgellm_producer.wire import Status
from edgellm_worker.errors import ExitCode
from tests.support.fleet import ServeProcess, outcome, producer_process
from tests.support.redis_server import RedisServer, wait_until

NUM_JOBS = 100  # per producer


def num_done(server: RedisServer, queue: str, job_id: str) -> int:
    with server.client(is_raw=True) as client:
        return sum(b"done" in fields for _, fields in client.xrange(Keys(queue).reply(job_id)))


def num_answered(server: RedisServer, queue: str) -> int:
    with server.client() as client:
        return sum(1 for _ in client.scan_iter(f"{Keys(queue).prefix}done:*", count=1000))


@pytest.mark.timeout(240)
def test_two_producers_two_workers_and_a_sigterm_mid_batch(default_server, queue_name, tmp_path: Path):
    """200 jobs, each exactly one `done`; the worker that is told to stop drains and exits 143."""
    with (
        ServeProcess(default_server, queue_name, tmp_path) as first,
        ServeProcess(default_server, queue_name, tmp_path, "--engine-home", "thread") as second,
    ):
        first.wait_ready()
        second.wait_ready()
        with (
            producer_process(default_server, queue_name, "a", NUM_JOBS) as one,
            producer_process(default_server, queue_name, "b", NUM_JOBS) as two,
        ):
            wait_until(lambda: first.value("request_success_total") >= 10, "ten answers", 60.0)
            by_first = first.value("request_success_total")
            first.send(signal.SIGTERM)
            assert first.wait() == ExitCode.TERMINATED
            replies = outcome(one) | outcome(two)
        assert len(replies) == 2 * NUM_JOBS
        assert {status for status, _, _ in replies.values()} == {Status.OK}
        assert {attempt for _, _, attempt in replies.values()} == {1}, "a drain costs no attempt"
        assert len({worker for _, worker, _ in replies.values()}) == 2
        assert all(num_done(default_server, queue_name, job_id) == 1 for job_id in replies)
        assert by_first + second.value("request_success_total") <= 2 * NUM_JOBS
        assert second.value("step_rows_sum") / second.value("step_rows_count") > 2
        assert second.value("spec_decode_num_accepted_tokens_total") > 0
        wait_until(lambda: second.value("queue_length") == 0, "an empty queue seen by the sweep")
        assert second.value("queue_dead") == 0


@pytest.mark.timeout(240)
def test_sigkill_mid_batch_and_the_other_worker_finishes(default_server, queue_name, tmp_path: Path):
    """Lease 1 s: what the killed worker held is taken over, and still answered once."""
    with (
        ServeProcess(default_server, queue_name, tmp_path) as victim,
        ServeProcess(default_server, queue_name, tmp_path) as survivor,
    ):
        victim.wait_ready()
        survivor.wait_ready()
        with producer_process(default_server, queue_name, "k", 40) as producer:
            wait_until(lambda: victim.value("slots_busy") >= 2, "rows in the victim", 60.0)
            victim.send(signal.SIGKILL)
            victim.wait()
            replies = outcome(producer)
        assert {status for status, _, _ in replies.values()} == {Status.OK}
        assert max(attempt for _, _, attempt in replies.values()) == 2, "a job was caught in the middle"
        assert all(num_done(default_server, queue_name, job_id) == 1 for job_id in replies)
        assert survivor.value("jobs_reclaimed_total") >= 1


@pytest.mark.timeout(120)
async def test_a_worker_that_cannot_start_leaves_the_queue_as_it_was(default_server, queue_name, tmp_path: Path):
    async with Producer(default_server.url, queue=queue_name) as producer:
        await producer.submit("def f(", max_tokens=2)
    keys = Keys(queue_name)
    with default_server.client() as client:
        before = client.xinfo_stream(keys.lanes[1])
        with ServeProcess(default_server, queue_name, tmp_path, "--model", str(tmp_path)) as worker:
            assert worker.wait() == ExitCode.OPERATOR
            assert "config.json" in worker.log.read_text()
        after = client.xinfo_stream(keys.lanes[1])
    assert (before["length"], before["last-generated-id"]) == (after["length"], after["last-generated-id"])
    assert num_answered(default_server, queue_name) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--engine", "tensorrt"), ExitCode.ENGINE, "no NVIDIA driver|cuda-python|TensorRT library"),
        (("--max-verify-tree-size", "3"), ExitCode.OPERATOR, "max-verify-tree-size 3 is below num_speculative_tokens"),
        (
            ("--quantization", "nvfp4"),
            ExitCode.OPERATOR,
            "quantization nvfp4: the reference engine decodes all weights",
        ),
    ],
)
async def test_an_engine_that_cannot_start_leaves_the_queue_as_it_was(
    default_server, queue_name, tmp_path: Path, flags: tuple[str, str], code: ExitCode, words: str
):
    async with Producer(default_server.url, queue=queue_name) as producer:
        await producer.submit("def f(", max_tokens=2)
    lane = Keys(queue_name).lanes[1]
    with default_server.client() as client:
        before = client.xinfo_stream(lane)
        with ServeProcess(default_server, queue_name, tmp_path, *flags) as worker:
            assert worker.wait() == code
            assert re.search(words, worker.log.read_text())
        after = client.xinfo_stream(lane)
    assert (before["length"], before["last-generated-id"]) == (after["length"], after["last-generated-id"])
    assert num_answered(default_server, queue_name) == 0


@pytest.mark.timeout(120)
def test_other_model_names_on_a_live_queue_are_refused(default_server, queue_name, tmp_path: Path):
    with ServeProcess(default_server, queue_name, tmp_path, "--engine-home", "thread") as worker:
        worker.wait_ready()
        with ServeProcess(default_server, queue_name, tmp_path, "--served-model-name", "other") as stranger:
            assert stranger.wait() == ExitCode.OPERATOR
            assert "one model per queue" in stranger.log.read_text()
        worker.send(signal.SIGINT)
        assert worker.wait() == ExitCode.INTERRUPTED
        assert "stopped" in worker.log.read_text()


@pytest.mark.timeout(120)
async def test_readiness_follows_the_drain_and_a_second_signal_hands_the_job_back(default_server, queue_name, tmp_path):
    """A signal during a long job: 503 with the reason, alive; the second: the job is free for others at once."""
    with ServeProcess(default_server, queue_name, tmp_path, "--engine-home", "thread", "--grace-s", "1000") as worker:
        worker.wait_ready()
        async with Producer(default_server.url, queue=queue_name) as producer:
            job = await producer.submit("def f(", max_tokens=480, ignore_eos=True)
            wait_until(lambda: worker.value("slots_busy") == 1, "a running row", 60.0)
            worker.send(signal.SIGTERM)
            wait_until(lambda: worker.get("/health/ready") == (503, "draining\n"), "503 with the reason")
            assert worker.get("/health/live") == (200, "ok\n")
            assert worker.value("worker_state", state="draining") == 1
            worker.send(signal.SIGTERM)
            assert worker.wait() == ExitCode.TERMINATED
            status = await job.status()
        assert (status.state, status.attempt) == (JobState.QUEUED, 0), "free to be taken, no attempt burnt"


@pytest.mark.timeout(120)
async def test_a_terminal_that_is_closed_is_a_drain(default_server, queue_name, tmp_path: Path):
    """Its log has nowhere to go from then on; the running job is answered all the same, under its first attempt."""
    master, slave = os.openpty()
    with ServeProcess(default_server, queue_name, tmp_path, terminal=slave) as worker:
        os.close(slave)
        worker.wait_ready()
        async with Producer(default_server.url, queue=queue_name) as producer:
            job = await producer.submit("def f(", max_tokens=24, ignore_eos=True)
            wait_until(lambda: worker.value("slots_busy") == 1, "a running row", 60.0)
            os.close(master)
            reply = await job.reply(timeout=60)
        assert worker.wait() == ExitCode.HUNG_UP
    assert (reply.status, reply.attempt) == (Status.OK, 1)
