"""OpenAI bodies to jobs and back, held against the official client's own types."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from edgellm_producer.envelope import seal
from edgellm_producer.errors import JobRejected, QueueFull
from edgellm_producer.openai.requests import Endpoint, request_from_body
from edgellm_producer.openai.responses import (
    ResponseShape,
    body_from_reply,
    chunk_from_delta,
    error_from_code,
    error_from_full_queue,
    first_chunk,
    last_chunk,
    usage_chunk,
)
from edgellm_producer.wire import (
    Delta,
    FinishReason,
    Job,
    Reply,
    Speculative,
    Status,
    TokenLogprob,
    TopLogprob,
    Usage,
    job_from,
)

CHAT = ResponseShape(Endpoint.CHAT, "j1", "tiny", 1_700_000_000)
TEXT = ResponseShape(Endpoint.COMPLETIONS, "j1", "tiny", 1_700_000_000)
LOGPROBS = [
    TokenLogprob(token_id=5, token="hé", logprob=-0.1, top_logprobs=[TopLogprob(token_id=5, token="hé", logprob=-0.1)]),
    TokenLogprob(token_id=6, token="llo", logprob=-0.2, top_logprobs=[TopLogprob(token_id=7, token="x", logprob=-3.0)]),
]
REPLY = Reply(
    id="j1",
    status=Status.OK,
    text="héllo",
    token_ids=[5, 6],
    logprobs=LOGPROBS,
    finish_reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5),
    speculative=Speculative(
        method="mtp",
        mean_acceptance_length=1.5,
        draft_acceptance_rate=0.25,
        acceptance_histogram=[1, 1, 0],
        num_spec_steps=2,
        num_draft_tokens=4,
        num_accepted_draft_tokens=1,
    ),
)

CHAT_BODY = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello!"}],
    "max_completion_tokens": 1000,
    "temperature": 0.5,
    "logit_bias": {"50256": -100},
    "stop": ["\n"],
    "n": 1,
    "user": "u-1",
    "stream": True,
    "stream_options": {"include_usage": True},
    "top_k": 20,
    "presence_penalty": None,
}


def test_a_chat_body_becomes_a_job():
    request = request_from_body(Endpoint.CHAT, CHAT_BODY)
    job = Job(id="a", **request.fields)
    assert request.include_usage
    assert job.max_tokens == 1000
    assert job.top_k == 20
    assert job.logit_bias == {50256: -100}
    assert job.stop == ["\n"]
    assert job.metadata == {"user": "u-1"}


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ("abc", "prompt", "abc"),
        (["abc"], "prompt", "abc"),
        ([1, 2, 3], "prompt_token_ids", [1, 2, 3]),
        ([[1, 2, 3]], "prompt_token_ids", [1, 2, 3]),
    ],
)
def test_every_form_of_a_single_completion_prompt(prompt, field, value):
    fields = request_from_body(Endpoint.COMPLETIONS, {"prompt": prompt, "logprobs": 2, "echo": False}).fields
    assert fields[field] == value
    assert (fields["logprobs"], fields["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        (Endpoint.CHAT, {"n": 2}, "n"),
        (Endpoint.CHAT, {"audio": {}}, "audio"),
        (Endpoint.CHAT, {"functions": []}, "functions"),
        (Endpoint.CHAT, {"modalities": ["audio"]}, "modalities"),
        (Endpoint.CHAT, {"prompt": "x"}, "prompt"),
        (Endpoint.CHAT, {"stream_options": {"other": 1}}, "stream_options"),
        (Endpoint.COMPLETIONS, {"best_of": 3}, "best_of"),
        (Endpoint.COMPLETIONS, {"echo": True}, "echo"),
        (Endpoint.COMPLETIONS, {"suffix": "end"}, "suffix"),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (Endpoint.COMPLETIONS, {"messages": []}, "messages"),
        (Endpoint.CHAT, [], "body"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(endpoint, body, field):
    with pytest.raises(JobRejected) as caught:
        request_from_body(endpoint, body)
    assert caught.value.field == field


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_NAMES = (
    *Job.model_fields,
    *("n", "best_of", "echo", "suffix", "stream_options", "max_completion_tokens", "user", "modalities", "lora"),
)


@pytest.mark.parametrize("endpoint", Endpoint)
@given(body=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4))
@example(body={"prompt": "x", "logprobs": "many"})
@example(body={"prompt": "x", "logprobs": [1]})
@example(body={"prompt": "x", "logprobs": math.nan})
def test_every_body_is_a_job_or_a_refusal(endpoint, body):
    given_prompt = {"prompt": "x"} if endpoint is Endpoint.COMPLETIONS else {"messages": [{"role": "user"}]}
    field: str | None = "none: it is a job"
    try:
        seal(request_from_body(endpoint, {**given_prompt, **body}).fields)
    except JobRejected as refusal:
        field = refusal.field
    assert field


def test_whole_responses_are_what_the_official_client_reads():
    chat = ChatCompletion.model_validate(body_from_reply(CHAT, REPLY), strict=True)
    assert chat.choices[0].message.content == "héllo"
    assert chat.choices[0].logprobs.content[0].bytes == list("hé".encode())
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.total_tokens == 5
    text = Completion.model_validate(body_from_reply(TEXT, REPLY), strict=True)
    assert text.choices[0].text == "héllo"
    assert text.choices[0].logprobs.text_offset == [0, 2]
    assert text.choices[0].logprobs.top_logprobs == [{"hé": -0.1}, {"x": -3.0}]


def test_speculative_metrics_carry_vllms_names():
    spec = body_from_reply(CHAT, REPLY)["metrics"]["speculative_decoding"]
    assert spec == {
        "mean_acceptance_length": 1.5,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [1, 1, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 1,
        "num_draft_tokens": 4,
        "num_spec_tokens": 2,
    }


def test_streams_are_what_the_official_client_reads():
    delta = Delta(attempt=1, offset_tokens=0, text="hé", token_ids=[5], logprobs=LOGPROBS[:1])
    chunks = [first_chunk(CHAT), chunk_from_delta(CHAT, delta), last_chunk(CHAT, REPLY), usage_chunk(CHAT, REPLY)]
    read = [ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk)), strict=True) for chunk in chunks]
    assert read[0].choices[0].delta.role == "assistant"
    assert read[1].choices[0].delta.content == "hé"
    assert read[2].choices[0].finish_reason == "stop"
    assert read[3].usage.completion_tokens == 2
    assert {c.id for c in read} == {"chatcmpl-j1"}


@pytest.mark.parametrize(
    ("code", "status"),
    [("invalid_field", 400), ("context_length_exceeded", 400), ("model_not_found", 404), ("engine_error", 500)],
)
def test_errors_have_openais_shape_and_status(code, status):
    error = error_from_code(code, "no", "temperature")
    assert error.status == status
    assert error.body["error"] | {"type": ""} == {"message": "no", "type": "", "param": "temperature", "code": code}


def test_a_full_queue_is_429():
    assert error_from_full_queue(QueueFull(10, 10)).status == 429


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"prompt": "a", "top_logprobs": 3}, "top_logprobs"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
    ],
)
def test_a_wrong_job_names_a_field(fields, field):
    with pytest.raises(JobRejected) as caught:
        job_from({"id": "a", **fields})
    assert caught.value.field == field
