"""Deltas of several attempts, and envelopes: what needs no server."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm_producer import Delta, JobRejected, Reply, Restarted, Status
from edgellm_producer.envelope import seal
from edgellm_producer.streaming import DeltaMerger


def deltas(attempt: int, pieces: list[str]) -> list[Delta]:
    return [Delta(attempt=attempt, offset_tokens=i, text=piece, token_ids=[i]) for i, piece in enumerate(pieces)]


def shown(events: list[Delta | Restarted]) -> str:
    text = ""
    for event in events:
        text = "" if isinstance(event, Restarted) else text + event.text
    return text


def run(merger: DeltaMerger, pieces: list[Delta]) -> list[Delta | Restarted]:
    return [event for piece in pieces for event in merger.add(piece)]


def test_one_attempt_passes_through() -> None:
    assert run(DeltaMerger(), deltas(1, ["a", "b"])) == deltas(1, ["a", "b"])


def test_a_second_attempt_skips_what_was_said() -> None:
    merger = DeltaMerger()
    run(merger, deltas(1, ["a", "b"]))
    assert run(merger, deltas(2, ["a", "b"])) == []
    (event,) = merger.add(Delta(attempt=2, offset_tokens=2, text="c", token_ids=[2]))
    assert event == Delta(attempt=2, offset_tokens=2, text="c", token_ids=[2])


def test_a_piece_that_reaches_past_what_was_said_is_cut() -> None:
    merger = DeltaMerger()
    run(merger, deltas(1, ["a", "b"]))
    (event,) = merger.add(Delta(attempt=2, offset_tokens=0, text="abcd", token_ids=[0, 1, 2, 3]))
    assert event == Delta(attempt=2, offset_tokens=2, text="cd", token_ids=[2, 3])


def test_another_text_restarts() -> None:
    merger = DeltaMerger()
    run(merger, deltas(1, ["a", "b"]))
    events = run(merger, deltas(2, ["a", "x", "y"]))
    assert events[0] == Restarted(2)
    assert shown(events) == "axy"


def test_what_comes_twice_or_late_is_not_shown() -> None:
    merger = DeltaMerger()
    first = deltas(1, ["a"])
    assert run(merger, first + first) == first
    run(merger, deltas(2, ["a", "b"]))
    assert run(merger, deltas(1, ["a", "z"])) == []


def test_tokens_without_a_text_of_their_own_are_told() -> None:
    """Half a character: the text comes with a later token."""
    merger = DeltaMerger()
    assert [event.token_ids for event in run(merger, deltas(1, ["", "", "é"]))] == [[0], [1], [2]]


def test_what_the_answer_adds_has_log_probabilities_where_the_job_asked_for_them() -> None:
    said = [{"token_id": 1, "token": "a", "logprob": -0.5}]
    asked = Reply(id="x", status=Status.OK, text="a", token_ids=[1], attempt=1, logprobs=said)
    (event,) = DeltaMerger().end(asked)
    assert event.logprobs == asked.logprobs != []
    (event,) = DeltaMerger().end(asked.model_copy(update={"logprobs": None}))
    assert event.logprobs is None


def test_a_job_that_did_not_stream_is_shown_at_its_end() -> None:
    reply = Reply(id="x", status=Status.OK, text="all", token_ids=[1, 2], attempt=1)
    assert shown(DeltaMerger().end(reply)) == "all"


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=6), st.lists(st.integers(0, 6), max_size=3))
def test_whatever_was_cut_short_the_reader_ends_with_the_answer(pieces: list[str], cuts: list[int]) -> None:
    merger = DeltaMerger()
    events: list[Delta | Restarted] = []
    for attempt, cut in enumerate([*cuts, len(pieces)], start=1):
        events += run(merger, deltas(attempt, pieces[:cut]))
    text = "".join(pieces)
    events += merger.end(Reply(id="x", status=Status.OK, text=text, token_ids=[*range(len(pieces))], attempt=9))
    assert shown(events) == text
    assert not any(isinstance(event, Restarted) for event in events)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": "x", "temperature": -1.0}, "invalid_field", "temperature"),
        ({"prompt": "x", "beams": 2}, "unsupported_field", "beams"),
        ({"prompt": "x", "timeout_s": 0.0}, "timeout", "timeout_s"),
        ({"prompt": "x" * (1 << 20)}, "too_large", "job"),
        ({"messages": [{"role": "user"}], "tool_choice": "required"}, "unsupported_field", "tool_choice"),
        ({"prompt": "x", "id": "{}"}, "invalid_field", "id"),
        ({"prompt": "x", "tenant": "a:b"}, "invalid_field", "tenant"),
        ({"prompt": "x", "v": 2}, "unsupported_version", "v"),
        ({}, "invalid_field", "prompt"),
    ],
)
def test_a_wrong_job_is_rejected_by_field_before_it_is_sent(
    fields: dict[str, object], code: str, field: str | None
) -> None:
    with pytest.raises(JobRejected) as caught:
        seal(fields)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "x", "lora": "a"}, "lora: no field of protocol version 1"),
        (
            {"prompt": "x", "response_format": {"type": "xml"}},
            "response_format: type is 'xml', not one of text, json_object, json_schema, regex",
        ),
    ],
    ids=["unknown field", "a check of our own"],
)
def test_a_rejection_says_why_in_the_protocols_words(fields: dict[str, object], said: str) -> None:
    with pytest.raises(JobRejected) as caught:
        seal(fields)
    assert str(caught.value) == said


def test_deep_nesting_is_rejected_by_field() -> None:
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(JobRejected) as caught:
        seal({"prompt": "x", "metadata": {"k": deep}})
    assert caught.value.field == "metadata"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "half of an emoji: \ud83d"}, "prompt"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
        ({"prompt": "x", "metadata": {"n": 1 << 64}}, "metadata"),
        ({"prompt": "x", "metadata": {"n": object()}}, "metadata"),
    ],
    ids=["prompt", "messages", "integer", "object"],
)
def test_what_the_wire_cannot_carry_is_rejected_by_field(fields: dict, field: str) -> None:
    with pytest.raises(JobRejected, match="cannot be sent") as caught:
        seal(fields)
    assert caught.value.field == field


def test_an_envelope_holds_what_was_given_and_nothing_else() -> None:
    envelope = seal({"prompt": "x", "stop": "a", "id": "i", "seed": None})
    assert msgpack.unpackb(envelope.packed) == {"v": 1, "id": "i", "prompt": "x", "stop": ["a"]}
    assert envelope.digest == ""


def test_a_digest_is_of_the_body_alone() -> None:
    def digest(**fields: object) -> str:
        return seal({"idempotency_key": "k", "prompt": "x", **fields}).digest

    assert digest(id="a") == digest(id="b")
    assert digest(max_tokens=1) != digest(max_tokens=2)
