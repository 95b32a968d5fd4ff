"""The daemon over fakes: every step of the loop, from a job taken to its answer."""

from __future__ import annotations

import asyncio

import pytest

from edgellm_producer.keys import Priority
from edgellm_producer.wire import ErrorCode, FinishReason, Status
from edgellm_worker.batching import Scheduling
from edgellm_worker.engine.api import FinishReason as RowFinish
from edgellm_worker.engine.errors import RequestError
from tests.support.daemons import config, job, running, tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.memory_queue import MemoryQueue


@pytest.fixture
def queue():
    return MemoryQueue()


def text_of(prompt: str, num_tokens: int) -> str:
    """What the fake engine says to this prompt."""
    ids = tokenizer().encode(prompt)
    return tokenizer().decode([ids[i % len(ids)] for i in range(num_tokens)])


class TestAnswers:
    async def test_every_job_gets_its_own_text_once(self, queue):
        async with running(queue, FakeEngine(at_once=True)):
            for n in range(30):
                queue.submit(job(f"j{n}", prompt=f"number {n} of many", max_tokens=6))
            for n in range(30):
                reply = await queue.reply(f"j{n}")
                assert reply.status is Status.OK
                assert reply.text == text_of(f"number {n} of many", 6)
        assert all(len(replies) == 1 for replies in queue.replies.values())
        assert not queue.held

    async def test_reply_holds_usage_timings_drafting_and_batch(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", max_tokens=6), age_s=1.0)
            await queue.until(lambda: engine.rows)
            engine.step(3)
            engine.step(3)
            reply = await queue.reply("a")
        assert reply.finish_reason is FinishReason.LENGTH
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (6, 6, 12)
        assert reply.timings.queue_ms >= 1000
        assert reply.timings.total_ms >= reply.timings.time_to_first_token_ms >= reply.timings.queue_ms
        speculative = reply.speculative
        assert (speculative.method, speculative.num_spec_steps) == ("mtp", 2)
        assert (speculative.num_draft_tokens, speculative.num_accepted_draft_tokens) == (6, 4)
        assert speculative.mean_acceptance_length == 3.0
        assert speculative.acceptance_histogram == [0, 0, 2]
        assert speculative.draft_acceptance_rate == pytest.approx(4 / 6)
        assert reply.batch is not None
        assert (reply.batch.id, reply.batch.size, reply.batch.engine) == ("worker-1-1", 1, "fake")
        assert reply.attempt == 1
        assert reply.seed is not None

    async def test_a_finished_rows_reply_leaves_at_once(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("short", max_tokens=1))
            queue.submit(job("long", max_tokens=50))
            await queue.until(lambda: len(engine.rows) == 2)
            engine.step()
            await queue.reply("short")
            assert len(engine.rows) == 1

    async def test_what_a_worker_holds_is_counted_at_the_scrape(self, queue):
        engine = FakeEngine()
        async with running(queue, engine) as daemon:
            queue.submit(job("a", max_tokens=1))
            await queue.until(lambda: engine.rows)
            assert b"edgellm_num_requests_running 1.0" in daemon.render()
            engine.step()
            await queue.reply("a")
            assert b"edgellm_num_requests_running 0.0" in daemon.render()

    async def test_replies_of_one_step_leave_in_one_round_trip(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(sweep_s=60)):
            for n in range(4):
                queue.submit(job(f"j{n}"))
            await queue.until(lambda: len(engine.rows) == 4)
            before = queue.num_commands
            engine.step(4)
            for n in range(4):
                await queue.reply(f"j{n}")
            assert queue.num_commands - before <= 2, "one finish, and at most one read"

    async def test_a_stop_string_ends_the_row_in_the_engine_and_the_tokens_end_with_the_text(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", prompt="one two three four", max_tokens=40, stop=["three"]))
            await queue.until(lambda: engine.rows)
            engine.step(8)
            reply = await queue.reply("a")
            await queue.until(lambda: not engine.rows)
        assert reply.finish_reason is FinishReason.STOP
        assert reply.text == "one two "
        assert reply.usage.completion_tokens == len(reply.token_ids) == len(tokenizer().encode("one two "))

    async def test_max_tokens_in_the_same_step_as_a_stop_string_is_a_stop(self, queue):
        """sglang#31599"""
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", prompt="one two three four", max_tokens=4, stop=["two"]))
            await queue.until(lambda: engine.rows)
            engine.step(4)
            assert (await queue.reply("a")).finish_reason is FinishReason.STOP

    async def test_logprobs_end_with_the_tokens(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", prompt="one two three", max_tokens=30, stop=["three"], logprobs=True, top_logprobs=1))
            await queue.until(lambda: engine.rows)
            engine.step(5)
            reply = await queue.reply("a")
        assert reply.logprobs is not None
        assert [entry.token_id for entry in reply.logprobs] == reply.token_ids
        assert reply.logprobs[0].top_logprobs[0].token_id == reply.token_ids[0]

    async def test_a_row_that_fails_alone_is_answered_and_its_neighbours_finish(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("bad"))
            queue.submit(job("good"))
            await queue.until(lambda: len(engine.rows) == 2)
            engine.finish_row(engine.added[0], RowFinish.ERROR, "scores are not numbers")
            reply = await queue.reply("bad")
            engine.step(4)
            assert (await queue.reply("good")).status is Status.OK
        assert (reply.status, reply.finish_reason) == (Status.FAILED, FinishReason.ERROR)
        assert reply.error is not None
        assert (reply.error.code, reply.error.message) == (ErrorCode.ENGINE_ERROR, "scores are not numbers")


REFUSALS = [
    pytest.param({"model": "other"}, ErrorCode.MODEL_NOT_FOUND, "model", id="unknown model"),
    pytest.param({"prompt": "x " * 70}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt", id="over-long prompt"),
    pytest.param({"max_tokens": 1000}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens", id="explicit excess"),
    pytest.param({"prompt_token_ids": [9999]}, ErrorCode.INVALID_FIELD, "prompt_token_ids", id="outside vocabulary"),
    pytest.param({"logit_bias": {9999: 1.0}}, ErrorCode.INVALID_FIELD, "logit_bias", id="bias outside vocabulary"),
    pytest.param({"prompt": ""}, ErrorCode.INVALID_FIELD, "prompt", id="empty prompt"),
    pytest.param({"messages": [{"role": 3}]}, ErrorCode.TEMPLATE_ERROR, "messages", id="template fails"),
    pytest.param(
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ErrorCode.UNSUPPORTED_FIELD,
        "messages",
        id="image content",
    ),
    pytest.param({"tool_choice": "required"}, ErrorCode.UNSUPPORTED_FIELD, "tool_choice", id="not built"),
]


class TestRefusals:
    @pytest.mark.parametrize(("fields", "code", "field"), REFUSALS)
    async def test_a_bad_job_is_refused_before_the_batch_and_its_neighbours_finish(self, queue, fields, code, field):
        """vllm#43920, sglang#7897: one malformed job must not cost its batch anything."""
        engine = FakeEngine(at_once=True)
        async with running(queue, engine):
            queue.submit(job("bad", **fields))
            queue.submit(job("good"))
            reply = await queue.reply("bad")
            assert (await queue.reply("good")).status is Status.OK
        assert reply.status is Status.REJECTED
        assert reply.error is not None
        assert (reply.error.code, reply.error.field) == (code, field)
        assert len(engine.added) == 1, "the engine never saw it"

    async def test_what_the_engine_cannot_take_is_refused_by_the_field_it_names(self, queue):
        engine = FakeEngine(refuse=lambda _: RequestError("min_p", "not on this engine", code="unsupported_field"))
        async with running(queue, engine):
            queue.submit(job("a", min_p=0.1))
            reply = await queue.reply("a")
        assert reply.error is not None
        assert (reply.error.code, reply.error.field) == ("unsupported_field", "min_p")

    async def test_missing_max_tokens_is_the_default_capped_by_the_room(self, queue):
        engine = FakeEngine(at_once=True)
        async with running(queue, engine):
            queue.submit(job("a", prompt="one two", max_tokens=None))
            reply = await queue.reply("a")
        limits = engine.limits
        assert reply.usage.completion_tokens == limits.max_new_tokens(reply.usage.prompt_tokens)


class TestStreaming:
    async def test_deltas_add_up_to_the_text_and_come_before_the_answer(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", max_tokens=8, stream=True))
            await queue.until(lambda: engine.rows)
            for _ in range(4):
                engine.step(2)
                await asyncio.sleep(0.03)
            reply = await queue.reply("a")
        deltas = queue.deltas["a"]
        assert len(deltas) >= 2
        assert "".join(delta.text for delta in deltas) == reply.text
        assert [token for delta in deltas for token in delta.token_ids] == reply.token_ids
        starts = [delta.offset_tokens for delta in deltas]
        assert starts == [sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))]

    async def test_steps_within_20_ms_are_merged_into_one_delta(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", max_tokens=40, stream=True))
            await queue.until(lambda: engine.rows)
            for _ in range(20):
                engine.step(2)
            await queue.reply("a")
        assert len(queue.deltas["a"]) <= 3

    async def test_a_delta_is_sent_20_ms_later_even_without_a_further_step(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(sweep_s=60)):
            queue.submit(job("a", max_tokens=40, stream=True))
            await queue.until(lambda: engine.rows)
            engine.step(2)
            await queue.until(lambda: "a" in queue.deltas)
            engine.step(2)
            await queue.until(lambda: sum(len(d.token_ids) for d in queue.deltas["a"]) == 4)

    async def test_without_stream_there_are_no_deltas(self, queue):
        async with running(queue, FakeEngine(at_once=True)):
            queue.submit(job("a"))
            await queue.reply("a")
        assert not queue.deltas

    async def test_a_delta_that_may_have_been_written_is_sent_again_unchanged(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", max_tokens=8, stream=True))
            await queue.until(lambda: engine.rows)
            queue.down = True
            engine.step(2)
            await asyncio.sleep(0.03)
            engine.step(2)
            queue.down = False
            engine.step(4)
            reply = await queue.reply("a")
        assert queue.deltas["a"][0].token_ids == reply.token_ids[:2], "the cut stays where it was"
        assert "".join(delta.text for delta in queue.deltas["a"]) == reply.text


class TestScheduling:
    async def test_the_worker_never_reads_more_than_its_free_slots(self, queue):
        engine = FakeEngine()
        for n in range(20):
            queue.submit(job(f"j{n}"))
        async with running(queue, engine):
            await queue.until(lambda: len(engine.rows) == 4)
            await asyncio.sleep(0.05)
            assert len(queue.held) == 4
            engine.step(4)
            await queue.until(lambda: len(engine.rows) == 4)
            assert len(queue.held) == 4
        assert engine.max_rows == 4

    async def test_in_flight_jobs_join_while_others_run(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a", max_tokens=20))
            await queue.until(lambda: engine.rows)
            engine.step()
            queue.submit(job("b"))
            await queue.until(lambda: len(engine.rows) == 2)

    async def test_static_jobs_wait_for_the_batch_to_end_and_are_not_even_read(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(scheduling=Scheduling.STATIC)):
            queue.submit(job("a", max_tokens=8))
            await queue.until(lambda: engine.rows)
            queue.submit(job("b"))
            engine.step(4)
            await asyncio.sleep(0.05)
            assert set(queue.held) == {"a"}
            engine.step(4)
            await queue.until(lambda: "b" in queue.held)

    async def test_rows_of_different_keys_never_run_together(self, queue):
        engine = FakeEngine(key_of=lambda request: request.max_new_tokens)
        async with running(queue, engine):
            for n in range(4):
                queue.submit(job(f"j{n}", max_tokens=4 + n % 2))
            await queue.until(lambda: len(engine.rows) == 2)
            assert {row.request.max_new_tokens for row in engine.rows.values()} == {4}
            engine.step(4)
            await queue.until(lambda: len(engine.rows) == 2)
            assert {row.request.max_new_tokens for row in engine.rows.values()} == {5}

    async def test_a_job_whose_last_holder_vanished_runs_alone(self, queue):
        engine = FakeEngine()
        queue.submit(job("suspect"), runs_alone=True)
        queue.submit(job("other"))
        async with running(queue, engine):
            await queue.until(lambda: engine.rows)
            await asyncio.sleep(0.05)
            assert len(engine.rows) == 1
            engine.step(4)
            await queue.until(lambda: "other" in queue.held and len(engine.rows) == 1)

    async def test_lanes_are_served_best_first(self, queue):
        engine = FakeEngine()
        queue.submit(job("low", priority=Priority.LOW))
        queue.submit(job("high", priority=Priority.HIGH))
        async with running(queue, engine):
            await queue.until(lambda: len(engine.rows) == 2)
            engine.step(4)
            low, high = await queue.reply("low"), await queue.reply("high")
        assert low.batch == high.batch, "one read, one batch; within it the order of rows is the lanes'"
