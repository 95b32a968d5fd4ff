"""Jobs through the daemon to the vendor engine over its fake runtime: every job one right answer, few native calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edgellm_producer.wire import FinishReason, Reply, Status
from edgellm_worker.engine.runtime.handle import ThreadEngineHandle
from tests.support import daemons
from tests.support.edgellm_setup import count_tokens, open_fake, write_bundle
from tests.support.fake_edgellm import Behaviour, Script
from tests.support.memory_queue import MemoryQueue

EOS_IDS = daemons.tokenizer().eos_token_ids
EOS = min(EOS_IDS)
WORDS = daemons.tokenizer().encode(" one two three four five six seven eight")


def script_of(text: str) -> Script:
    """A row that writes words until its limit, or, for "stop", two of them."""
    if text.startswith("bad"):
        return Script([[WORDS[0]]], error="EDGELLM_INPUT_TOO_LONG: prefill length 9 exceeds engine max_input_len 8")
    words = list(WORDS)
    if text.startswith("stop"):
        return Script([words[:1], [words[1], EOS]], eos=EOS_IDS)
    return Script([words[:1], words[1:4], words[4:5]], eos=EOS_IDS)


@asynccontextmanager
async def worker(tmp_path: Path, behaviour: Behaviour) -> AsyncIterator[MemoryQueue]:
    engine = ThreadEngineHandle(open_fake(write_bundle(tmp_path, max_batch_size=4), behaviour))
    queue = MemoryQueue()
    try:
        async with daemons.running(queue, engine, daemons.config(linger_s=0.05)):  # type: ignore[arg-type]
            yield queue
    finally:
        await engine.close()


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour(script_of, count_tokens)


async def replies(queue: MemoryQueue, *job_ids: str) -> dict[str, Reply]:
    async with asyncio.timeout(20):
        return {job_id: await queue.reply(job_id) for job_id in job_ids}


async def test_eight_mixed_jobs(tmp_path: Path, behaviour: Behaviour) -> None:
    jobs = {
        "greedy": {"prompt": "count", "max_tokens": 4},
        "greedy-stop": {"prompt": "stop"},
        "sampled": {"prompt": "count", "max_tokens": 3, "temperature": 1.0, "seed": 5},
        "sampled-stop": {"prompt": "stop", "temperature": 1.0, "seed": 6},
        "biased": {"prompt": "count", "max_tokens": 2, "logit_bias": {"7": 1.0}},
        "penalty": {"prompt": "count", "presence_penalty": 0.5},
        "ids": {"prompt_token_ids": list(daemons.tokenizer().encode("count")), "max_tokens": 2},
        "halves": {"prompt_token_ids": [*daemons.tokenizer().encode("a"), *daemons.tokenizer().encode("b")]},
    }
    async with worker(tmp_path, behaviour) as queue:
        for job_id, fields in jobs.items():
            queue.submit(daemons.job(job_id, **fields))
        got = await replies(queue, *jobs)
    assert [got[name].status for name in ("penalty", "halves")] == [Status.REJECTED] * 2
    assert got["penalty"].error is not None
    assert got["penalty"].error.field == "presence_penalty"
    served = {name: reply for name, reply in got.items() if name not in ("penalty", "halves")}
    assert all(reply.status is Status.OK for reply in served.values())
    assert {name: len(reply.token_ids) for name, reply in served.items()} == {
        "greedy": 4,
        "greedy-stop": 3,
        "sampled": 3,
        "sampled-stop": 3,
        "biased": 2,
        "ids": 2,
    }
    assert served["greedy-stop"].finish_reason is FinishReason.STOP
    assert served["greedy"].finish_reason is FinishReason.LENGTH
    assert served["greedy"].speculative is not None
    assert served["greedy"].speculative.method == "mtp"
    assert served["greedy"].speculative.acceptance_histogram == [0, 0, 1]
    assert served["sampled"].speculative is not None
    assert served["sampled"].speculative.method == "off: this engine drafts at temperature 0 only"
    kinds = {(call["temperature"], call["disable_spec_decode"]) for call in behaviour.calls}
    assert kinds == {(0.0, False), (1.0, True)}
    assert sum(len(call["texts"]) for call in behaviour.calls) == 6
    assert 2 <= len(behaviour.calls) <= 4  # greedy and sampled never share; arrivals may split a kind


async def test_the_row_at_fault_fails_and_its_company_is_served(tmp_path: Path, behaviour: Behaviour) -> None:
    async with worker(tmp_path, behaviour) as queue:
        for job_id, prompt in {"one": "stop", "two": "bad", "three": "count"}.items():
            queue.submit(daemons.job(job_id, prompt=prompt))
        got = await replies(queue, "one", "two", "three")
    assert (got["one"].status, got["three"].status) == (Status.OK, Status.OK)
    assert got["two"].status is Status.FAILED
    assert got["two"].error is not None
    assert "EDGELLM_INPUT_TOO_LONG" in got["two"].error.message


async def test_a_cancelled_job_ends_while_its_batch_runs_on(tmp_path: Path, behaviour: Behaviour) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(number: int) -> None:
        if number == 2:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    behaviour.before_round = hold
    async with worker(tmp_path, behaviour) as queue:
        queue.submit(daemons.job("gone", prompt="count", max_tokens=100))
        queue.submit(daemons.job("stays", prompt="count", max_tokens=6))
        await queue.until(lambda: bool(behaviour.calls))
        queue.cancel("gone")
        gone = await replies(queue, "gone")
        assert gone["gone"].status is Status.CANCELLED
        release.set()
        got = await replies(queue, "stays")
    assert got["stays"].status is Status.OK
    assert len(got["stays"].token_ids) == 6
