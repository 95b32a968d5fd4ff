"""What a request may ask, and how a refusal names its field."""

import math
from dataclasses import replace

import pytest

from edgellm_worker.engine.api import EngineLimits, GenerationRequest, SamplingParams
from edgellm_worker.engine.errors import RequestError
from edgellm_worker.engine.runtime.rules import SpeculativeRules

LIMITS = EngineLimits(4, 50, 64, 4, 3, 3, 100)
RULES = SpeculativeRules(LIMITS)
GOOD = GenerationRequest((1, 2, 3), 10)
CONTEXT = "context_length_exceeded"


def sampling(**changes: object) -> GenerationRequest:
    return replace(GOOD, sampling=replace(SamplingParams(), **changes))


@pytest.mark.parametrize(
    ("request_", "field", "code"),
    [
        (replace(GOOD, prompt_token_ids=()), "prompt_token_ids", "invalid_field"),
        (replace(GOOD, prompt_token_ids=(1, 100)), "prompt_token_ids", "invalid_field"),
        (replace(GOOD, prompt_token_ids=(-1,)), "prompt_token_ids", "invalid_field"),
        (replace(GOOD, prompt_token_ids=(1,) * 51), "prompt_token_ids", CONTEXT),
        (replace(GOOD, max_new_tokens=0), "max_tokens", "invalid_field"),
        (replace(GOOD, max_new_tokens=60), "max_tokens", CONTEXT),
        (replace(GOOD, grammar="{}"), "response_format", "invalid_field"),
        (sampling(logit_bias={100: 1.0}), "logit_bias", "invalid_field"),
        (sampling(temperature=math.nan), "temperature", "invalid_field"),
        (sampling(top_p=0.0), "top_p", "invalid_field"),
    ],
)
def test_a_refusal_names_the_field(request_: GenerationRequest, field: str, code: str):
    with pytest.raises(RequestError) as caught:
        RULES.validate(request_)
    assert (caught.value.field, caught.value.code) == (field, code)


def test_the_most_that_fits_is_taken():
    RULES.validate(replace(GOOD, max_new_tokens=LIMITS.max_new_tokens(3)))
    RULES.validate(replace(GOOD, prompt_token_ids=(99,) * 50, max_new_tokens=12))


def test_any_two_requests_may_share_a_batch():
    assert RULES.compat_key(GOOD) == RULES.compat_key(sampling(temperature=1.0, top_logprobs=3)) == ()
