"""A running job as a pure object: deltas at chosen times, held-back text, the reply."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm_producer.wire import BatchInfo, Delta, ErrorCode, FinishReason, Status
from edgellm_worker.engine.api import EngineTraits, RowUpdate
from edgellm_worker.engine.api import FinishReason as RowFinish
from edgellm_worker.jobs import Intake
from edgellm_worker.queue.api import Delivery
from edgellm_worker.running import CANCELLED, EXPIRED, Place, RunningJob
from tests.support.daemons import job, model, tokenizer
from tests.support.fake_engine import TRAITS, FakeEngine


def started(traits: EngineTraits = TRAITS, **fields: Any) -> RunningJob:
    """Read at 10.0 s after 2 s in the queue, in the engine at 10.5 s."""
    one = job("a", **{"max_tokens": 40, "stream": True, **fields})
    delivery = Delivery(one, one.priority, "1-0", 1, 1_000_000, None, taken_at=10.0, taken_at_ms=1_002_000)
    prepared = Intake(model(), FakeEngine()).prepare(delivery)
    return RunningJob(prepared, Place(7, BatchInfo(id="b", size=2, engine="fake"), 2, 10.5, traits), model())


def ids(text: str) -> tuple[int, ...]:
    return tokenizer().encode(text)


def send(running: RunningJob, at: float, *, last: bool = False) -> Delta | None:
    delta = running.next_delta(at, last=last)
    if delta is not None:
        running.delta_sent(at)
    return delta


class TestDeltas:
    def test_the_first_delta_is_due_at_once_and_the_next_20_ms_later(self):
        running = started()
        running.update(RowUpdate(7, ids("one")), 11.0)
        first = send(running, 11.0)
        assert first is not None
        assert (first.text, first.offset_tokens, first.attempt) == ("one", 0, 2)
        running.update(RowUpdate(7, ids(" two")), 11.005)
        running.update(RowUpdate(7, ids(" three")), 11.010)
        assert running.next_delta(11.015) is None
        assert running.delta_due_at() == pytest.approx(11.020)
        merged = send(running, 11.020)
        assert merged is not None
        assert merged.text == " two three"
        assert merged.offset_tokens == len(ids("one"))

    def test_an_unconfirmed_delta_is_given_again_as_it_was(self):
        running = started()
        running.update(RowUpdate(7, ids("one")), 11.0)
        first = running.next_delta(11.0)
        running.update(RowUpdate(7, ids(" two")), 11.1)
        assert running.next_delta(11.2) == first
        running.delta_sent(11.2)
        second = running.next_delta(11.3)
        assert second is not None
        assert second.text == " two"

    def test_the_last_delta_does_not_wait(self):
        running = started()
        running.update(RowUpdate(7, ids("one")), 11.0)
        send(running, 11.0)
        running.update(RowUpdate(7, ids(" two")), 11.001)
        last = send(running, 11.001, last=True)
        assert last is not None
        assert last.text == " two"
        assert running.next_delta(11.002, last=True) is None
        assert running.delta_due_at() is None

    def test_text_that_may_begin_a_stop_string_is_held_back_and_given_at_the_end(self):
        running = started(stop=[" two three"])
        running.update(RowUpdate(7, ids("one") + ids(" two")), 11.0)
        first = send(running, 11.0)
        assert first is not None
        assert first.text == "one"
        reply = running.end(Status.OK, FinishReason.LENGTH, 12.0, None)
        last = send(running, 12.0, last=True)
        assert last is not None
        assert (reply.text, last.text) == ("one two", " two")
        assert reply.usage.completion_tokens == len(ids("one")) + len(ids(" two"))

    def test_a_job_that_does_not_stream_has_none(self):
        running = started(stream=False)
        running.update(RowUpdate(7, ids("one")), 11.0)
        assert running.next_delta(11.0, last=True) is None
        assert running.delta_due_at() is None


class TestReply:
    def test_timings_are_taken_apart(self):
        running = started()
        running.update(RowUpdate(7, ids("one")), 11.0)
        reply = running.end(Status.OK, FinishReason.STOP, 12.0, None)
        timings = reply.timings
        assert (timings.queue_ms, timings.batch_wait_ms, timings.prefill_ms) == (2000.0, 500.0, 500.0)
        assert (timings.time_to_first_token_ms, timings.generation_ms, timings.total_ms) == (3000.0, 1000.0, 4000.0)

    def test_a_character_cut_in_the_middle_is_replaced(self):
        """Camelid#288"""
        running = started()
        whole = ids("🌍")
        assert len(whole) > 1
        running.update(RowUpdate(7, whole[:1], finish_reason=RowFinish.LENGTH), 11.0)
        reply = running.end(Status.OK, FinishReason.LENGTH, 11.0, None)
        assert reply.text == "\ufffd"
        assert reply.usage.completion_tokens == 1

    @pytest.mark.parametrize(("status", "error"), [(Status.CANCELLED, CANCELLED), (Status.EXPIRED, EXPIRED)])
    def test_partial_text_is_kept(self, status, error):
        running = started()
        running.update(RowUpdate(7, ids("one two")), 11.0)
        reply = running.end(status, FinishReason.CANCELLED, 12.0, error)
        assert (reply.text, reply.error) == ("one two", error)
        assert error.code in {ErrorCode.CANCELLED, ErrorCode.TIMEOUT}

    def test_its_end_in_the_engine_is_its_end(self):
        running = started()
        assert running.update(RowUpdate(7, ids("one")), 11.0) is None
        assert running.update(RowUpdate(7, (), finish_reason=RowFinish.STOP), 11.0) is FinishReason.STOP
        assert started().update(RowUpdate(7, (), finish_reason=RowFinish.ERROR), 11.0) is FinishReason.ERROR

    @pytest.mark.parametrize(
        ("traits", "update", "temperature", "method"),
        [
            (TRAITS, RowUpdate(7, (5,), num_drafted=3, num_accepted=1), 0.0, "mtp"),
            (TRAITS, RowUpdate(7, (5,), drafting_off="logprobs"), 0.0, "off: logprobs"),
            (TRAITS, RowUpdate(7, (5,)), 0.0, "off: no step drafted"),
            (
                EngineTraits("x", True, True, False, "mtp"),
                RowUpdate(7, (5,)),
                0.7,
                "off: this engine does not draft sampled rows",
            ),
            (EngineTraits("x", True, True, True, "off: no MTP"), RowUpdate(7, (5,)), 0.0, "off: no MTP"),
        ],
        ids=["drafted", "row not drafted", "never drafted", "sampled", "checkpoint without MTP"],
    )
    def test_the_reply_says_what_drafting_did_or_why_not(self, traits, update, temperature, method):
        """rMLX#519, LiteRT-LM#3017: drafting must not be off in silence."""
        running = started(traits, temperature=temperature)
        running.update(update, 11.0)
        assert running.end(Status.OK, FinishReason.STOP, 12.0, None).speculative.method == method
