"""What a job leaves unset comes from generation_config, then from constants; an unset seed from its id."""

import math
from typing import Any

import pytest

from edgellm_producer.wire import Job
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.sampling_defaults import SamplingDefaults, resolve_sampling, seed_of

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def resolved(generation_config: dict[str, Any], **job: Any) -> tuple[float, float, int, float, float]:
    params = resolve_sampling(Job(id="j", prompt="x", **job), SamplingDefaults.read(generation_config))
    return params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty


def test_unset_0_and_1_temperatures_are_three_behaviours() -> None:
    """Scenario: unset, 0 and 1 temperatures mixed in one batch -> three distinct behaviours."""
    assert resolved(QWEN)[0] == 0.6
    assert resolved(QWEN, temperature=0.0)[0] == 0.0
    assert resolved(QWEN, temperature=1.0)[0] == 1.0


def test_constants_hold_where_the_checkpoint_says_nothing() -> None:
    assert resolved({}) == (1.0, 1.0, 0, 0.0, 1.0)
    assert resolved({"temperature": None, "top_k": None}) == (1.0, 1.0, 0, 0.0, 1.0)


def test_do_sample_false_means_temperature_zero_unless_the_job_sets_one() -> None:
    assert resolved({"do_sample": False, "temperature": 0.6, "top_k": 20}) == (0.0, 1.0, 20, 0.0, 1.0)
    assert resolved({"do_sample": False, "temperature": 0.6}, temperature=0.3)[0] == 0.3


def test_every_field_of_the_job_wins_over_the_checkpoint() -> None:
    given = {"temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "repetition_penalty": 1.5}
    assert resolved(QWEN, **given) == (0.1, 0.2, 3, 0.4, 1.5)


def test_top_k_of_0_and_minus_1_are_off() -> None:
    assert resolved(QWEN, top_k=0)[2] == 0
    assert resolved(QWEN, top_k=-1)[2] == 0
    assert resolved({"top_k": -1})[2] == 0


def test_penalties_bias_and_logprobs_are_taken_over() -> None:
    job = Job(
        id="j",
        prompt="x",
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"7": 3.0},
        logprobs=True,
        top_logprobs=4,
    )
    params = resolve_sampling(job, SamplingDefaults())
    assert (params.frequency_penalty, params.presence_penalty, dict(params.logit_bias)) == (0.5, -0.5, {7: 3.0})
    assert params.top_logprobs == 4
    assert resolve_sampling(Job(id="j", prompt="x", logprobs=True), SamplingDefaults()).top_logprobs == 0
    assert resolve_sampling(Job(id="j", prompt="x"), SamplingDefaults()).top_logprobs is None


def test_the_seed_is_the_jobs_or_the_pinned_hash_of_its_id() -> None:
    def seed(**job: Any) -> int:
        return resolve_sampling(Job(prompt="x", **job), SamplingDefaults()).seed

    assert seed(id="a", seed=0) == 0
    assert seed(id="a", seed=(1 << 63) - 1) == (1 << 63) - 1
    assert seed(id="a") == seed(id="a") == seed_of("a") == 5374906597990186442
    assert seed(id="b") != seed(id="a")
    assert all(0 <= seed_of(str(i)) < 1 << 63 for i in range(200))


@pytest.mark.parametrize("bad", [-1, math.nan, "0.6", True, 1e9])
def test_bad_defaults_of_a_checkpoint_are_named_all_at_once(bad: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        SamplingDefaults.read({"temperature": bad, "top_p": 0.0, "top_k": 20})
    assert len(caught.value.problems) == 2
    assert "temperature" in caught.value.problems[0]
    assert "top_p" in caught.value.problems[1]
