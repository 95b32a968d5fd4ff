"""Which jobs the vendor's runtime can take, which may share a call, and that every batch-wide field is set."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm_worker.engine.api import EngineLimits, GenerationRequest, SamplingParams
from edgellm_worker.engine.edgellm.fields import PER_CALL_FIELDS, BatchFields, batch_fields, new_request
from edgellm_worker.engine.edgellm.native import Capabilities, detect
from edgellm_worker.engine.edgellm.rules import EdgeLlmRules, drafting_off, length_class
from edgellm_worker.engine.errors import RequestError
from tests.support import fake_edgellm as fake
from tests.support.edgellm_dump import load_dump
from tests.support.edgellm_values import ContextCacheLookupPolicy, ToolChoiceMode
from tests.support.fake_edgellm import Behaviour, Script

CAPACITY = 1024
DRAFTS = 3
LIMITS = EngineLimits(4, 512, CAPACITY - 2, DRAFTS + 1, DRAFTS, DRAFTS, 1000)
RULES = EdgeLlmRules(LIMITS)
EOS = frozenset({2})


def request(num_prompt: int = 10, max_new_tokens: int = 16, **sampling: Any) -> GenerationRequest:
    return GenerationRequest((5,) * num_prompt, max_new_tokens, SamplingParams(**sampling), EOS)


def test_a_prompt_of_the_longest_length_is_taken_and_one_token_more_is_not() -> None:
    RULES.validate(request(num_prompt=LIMITS.max_input_len))
    with pytest.raises(RequestError, match="513 tokens, this engine takes 512") as caught:
        RULES.validate(request(num_prompt=LIMITS.max_input_len + 1))
    assert caught.value.code == "context_length_exceeded"


def test_only_sampled_rows_are_told_why_they_are_not_drafted() -> None:
    assert drafting_off(request(temperature=0.0)) is None
    assert drafting_off(request(temperature=0.1)) == "this engine drafts at temperature 0 only"


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"min_p": 0.1, "temperature": 1.0}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"logit_bias": dict.fromkeys(range(999), 1.0) | {1: 1.0}}, None),
        ({"logit_bias": {1000: 1.0}}, "logit_bias"),
        ({"top_logprobs": 3, "temperature": 0.7}, "logprobs"),
        ({"top_logprobs": 3, "logit_bias": {1: 1.0}}, "logprobs"),
        ({"top_logprobs": 3}, None),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": -1}, "seed"),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": (1 << 63) - 1}, None),
    ],
)
def test_what_the_runtime_cannot_do_is_refused_by_name(sampling: dict[str, Any], field: str | None) -> None:
    if field is None:
        RULES.validate(request(**sampling))
        return
    with pytest.raises(RequestError) as caught:
        RULES.validate(request(**sampling))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (dataclasses.replace(request(), grammar="{}"), "response_format"),
        (dataclasses.replace(request(), eos_token_ids=frozenset()), "ignore_eos"),
        (request(num_prompt=0), "prompt_token_ids"),
        (request(num_prompt=513), "prompt_token_ids"),
        (request(max_new_tokens=0), "max_tokens"),
        (request(num_prompt=500, max_new_tokens=CAPACITY - 500 - DRAFTS), "max_tokens"),
        (dataclasses.replace(request(), prompt_token_ids=(5, 1000)), "prompt_token_ids"),
    ],
)
def test_other_requests_that_can_never_run_are_refused_by_name(bad: GenerationRequest, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        RULES.validate(bad)
    assert caught.value.field == field


def test_the_longest_answer_is_the_runtimes_own_clamp() -> None:
    """capacity - prompt - verify size."""
    RULES.validate(request(num_prompt=500, max_new_tokens=CAPACITY - 500 - (DRAFTS + 1)))


def test_a_row_that_the_longest_of_its_bucket_would_clamp_shares_with_its_own_length_only() -> None:
    short, long = RULES.compat_key(request(300, 400)), RULES.compat_key(request(300, 600))
    assert short == RULES.compat_key(request(500, 1))
    assert long != short
    assert long == RULES.compat_key(request(300, 700))
    assert long != RULES.compat_key(request(301, 600))


@given(
    st.lists(st.tuples(st.integers(1, 512), st.integers(1, 1000)), min_size=2, max_size=8),
)
def test_rows_of_one_key_never_clamp_each_other(shapes: list[tuple[int, int]]) -> None:
    rows = [request(n, m) for n, m in shapes if m <= LIMITS.max_new_tokens(n)]
    batches: dict[object, list[GenerationRequest]] = {}
    for row in rows:
        batches.setdefault(RULES.compat_key(row), []).append(row)
    for batch in batches.values():
        longest = max(len(row.prompt_token_ids) for row in batch)
        shortest = min(len(row.prompt_token_ids) for row in batch)
        assert all(longest + row.max_new_tokens + DRAFTS + 1 <= CAPACITY for row in batch)
        assert longest <= 128 or longest <= 2 * shortest


def test_every_sampling_field_of_a_call_separates_keys() -> None:
    plain = request(temperature=0.5, top_p=0.9, top_k=20)
    for change in ({"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 21}, {"temperature": 0.0}):
        other = dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **change))
        assert RULES.compat_key(plain) != RULES.compat_key(other), change
    for change in ({"seed": 9}, {"logit_bias": {3: 1.0}}):
        other = dataclasses.replace(plain, sampling=dataclasses.replace(plain.sampling, **change))
        assert RULES.compat_key(plain) == RULES.compat_key(other), change


@given(st.floats(0.001, 5.0), st.floats(0.01, 1.0), st.integers(0, 100))
def test_no_sampled_request_looks_greedy_to_the_runtime(temperature: float, top_p: float, top_k: int) -> None:
    """Its rule: greedy if top_k is 1, or unless top_k > 1, top_p < 1 - 1e-6, or temperature is away from 1."""
    fields = batch_fields(SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k))
    assert fields.disable_spec_decode
    assert top_k == 1 or top_k > 1 or fields.top_p < 1 - 1e-6


def test_every_field_of_the_native_request_is_set_explicitly() -> None:
    """A field that a later release adds fails here until someone decides its value."""
    recorded = set(load_dump().classes["LLMGenerationRequest"].properties)
    named = {field.name for field in dataclasses.fields(BatchFields)} - {"has_row_seeds"}
    assert named | PER_CALL_FIELDS == recorded
    assert not named & PER_CALL_FIELDS


def test_what_is_set_arrives() -> None:
    seen: dict[str, Any] = {}

    class Recorder:
        def __setattr__(self, name: str, value: Any) -> None:
            seen[name] = value

    module = fake.make_module(Behaviour(lambda text: Script([[1]])))
    module.LLMGenerationRequest = Recorder
    new_request(module, batch_fields(SamplingParams(temperature=0.7, top_k=5)), 33)
    assert set(seen) == set(fake.LLMGenerationRequest.FIELDS) - {"requests", "stream_channels"}
    assert seen["max_generate_length"] == 33
    assert seen["apply_chat_template"] is False
    assert seen["context_cache_lookup_policy"] is ContextCacheLookupPolicy.BYPASS
    assert seen["tool_choice"].mode is ToolChoiceMode.NONE
    assert seen["sampling_seed"] is None


@pytest.mark.parametrize(("wanted", "expected"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16)])
def test_length_classes(wanted: int, expected: int) -> None:
    assert length_class(wanted) == expected


def test_capabilities_are_read_from_signatures() -> None:
    module = fake.make_module(Behaviour(lambda text: Script([[1]])))
    assert detect(module) == Capabilities(
        batched_drafting=True, in_flight=True, in_flight_drafting=False, drafting_counters=True
    )
    bare = SimpleNamespace(LLMRuntime=object, LLMGenerationRequest=object)
    assert detect(bare) == Capabilities(
        batched_drafting=False, in_flight=False, in_flight_drafting=False, drafting_counters=False
    )
