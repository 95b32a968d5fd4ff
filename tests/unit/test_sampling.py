"""A row's own token: filters in their order, ties, penalties, log-probabilities, dense scores against candidates."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm_worker.engine.api import SamplingParams
from edgellm_worker.engine.errors import RequestError, RowError
from edgellm_worker.engine.runtime.noise import gumbel, noise_key
from edgellm_worker.engine.runtime.sampling import RowSampler, check_params, draw_ahead
from edgellm_worker.engine.runtime.scores import (
    NUM_CANDIDATES,
    Candidates,
    CandidateScores,
    DenseScores,
    log_sum_exp,
    top_indices,
)


def dense(*logits: float) -> DenseScores:
    return DenseScores(np.array(logits, np.float32))


def candidates(scores: DenseScores, k: int = NUM_CANDIDATES) -> CandidateScores:
    ids = top_indices(scores.logits, min(k, scores.logits.size))
    return CandidateScores(scores.logits[ids], ids.astype(np.int32), log_sum_exp(scores.logits))


def block(scores: CandidateScores, num_positions: int) -> Candidates:
    """One row with the same scores at every position."""
    values, ids = (np.array([[x] * num_positions]) for x in (scores.values, scores.ids))
    return Candidates(values, ids, np.full((1, num_positions), scores.log_sum_exp, np.float32))


def drawn(scores: DenseScores, num: int = 400, prompt: tuple[int, ...] = (0,), **params: float) -> set[int]:
    """Every token seen in `num` draws at different positions."""
    sampler = RowSampler(SamplingParams(seed=5, **params), prompt)
    return {sampler.draw(scores, t).token_id for t in range(num)}


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def oracle_support(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """What may be drawn, written the slow way: sort, cut to top_k, cut to top_p, cut by min_p."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    order = order[: params.top_k or len(order)]
    p = softmax(logits[order].astype(np.float64) / params.temperature)
    kept, mass = [], 0.0
    for token, share in zip(order, p, strict=True):
        if kept and mass >= params.top_p:
            break
        kept.append((token, share))
        mass += share
    return {token for token, share in kept if share >= params.min_p * kept[0][1] * (1 - 1e-12)}


def test_temperature_zero_takes_the_argmax_and_the_lowest_id_of_equals() -> None:
    sampler = RowSampler(SamplingParams(), (0,))
    assert sampler.draw(dense(0.0, 3.0, 3.0, 1.0), 0).token_id == 1
    assert sampler.draw(candidates(dense(0.0, 3.0, 3.0, 1.0)), 0).token_id == 1


def test_top_k_boundary_ties_go_to_the_lowest_ids() -> None:
    scores = dense(1.0, 2.0, 1.0, 1.0, 1.0)
    assert drawn(scores, temperature=1.0, top_k=3) == {1, 0, 2}
    assert top_indices(scores.logits, 3).tolist() == [1, 0, 2]


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    scores = dense(*np.log([0.5, 0.3, 0.15, 0.05]))
    assert drawn(scores, temperature=1.0, top_p=0.5) == {0}
    assert drawn(scores, temperature=1.0, top_p=0.51) == {0, 1}
    assert drawn(scores, temperature=1.0, top_p=0.9) == {0, 1, 2}
    assert drawn(scores, temperature=1.0, top_p=1e-9) == {0}


def test_top_p_counts_what_top_k_left() -> None:
    scores = dense(*np.log([0.4, 0.2, 0.2, 0.2]))
    assert drawn(scores, temperature=1.0, top_k=2, top_p=0.6) == {0}  # 0.4 / 0.6 is more than 0.6
    assert drawn(scores, temperature=1.0, top_p=0.6) == {0, 1}


def test_min_p_is_relative_to_the_best_and_follows_the_temperature() -> None:
    scores = dense(*np.log([0.6, 0.3, 0.1]))
    assert drawn(scores, temperature=1.0, min_p=0.4) == {0, 1}
    assert drawn(scores, temperature=2.0, min_p=0.4) == {0, 1, 2}
    assert drawn(scores, temperature=1.0, min_p=1.0) == {0}


def test_hopeless_tokens_may_be_left_out_but_possible_ones_never() -> None:
    """Against a full race over all tokens: skipping what noise cannot lift changes no draw."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 20, 500).astype(np.float32)
    sampler = RowSampler(SamplingParams(temperature=1.5, seed=3), (0,))
    for t in range(300):
        g = gumbel(np.array([noise_key(3, t)], np.uint64), np.arange(500))
        assert sampler.draw(DenseScores(logits), t).token_id == int((logits / 1.5 + g).argmax())


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 4.0])
def test_a_large_vocabulary_gives_what_a_race_of_all_its_tokens_gives(scale: float) -> None:
    """From equal logits, where anybody may win, to peaked ones, where the first 64 decide."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, scale, 40_000).astype(np.float32)
    sampler = RowSampler(SamplingParams(temperature=0.8, seed=3), (0,))
    listed = set(top_indices(logits, NUM_CANDIDATES).tolist())
    num_unlisted = 0
    for t in range(60):
        g = gumbel(np.array([noise_key(3, t)], np.uint64), np.arange(logits.size))
        z = (logits.astype(np.float64) - float(logits.max())) / 0.8
        own = sampler.draw(DenseScores(logits), t).token_id
        assert own == int((z + g).argmax())
        num_unlisted += own not in listed
    assert (num_unlisted > 50) == (scale < 2)


@pytest.mark.parametrize("k", [1, 5, 64, 500])
def test_the_best_of_many_are_those_of_a_full_sort(k: int) -> None:
    rng = np.random.default_rng(k)
    for scale in (0.0, 0.3, 30.0):
        values = np.round(rng.normal(0, scale, 50_001), 1).astype(np.float32)
        assert np.array_equal(top_indices(values, k), np.lexsort((np.arange(values.size), -values))[:k])


@given(seed=st.integers(0, 1 << 30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_draws_stay_inside_the_support_of_a_slow_oracle(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, 2, 40), 1).astype(np.float32)  # rounding makes ties
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.3, 0.7, 1.0, 1.6])),
        top_k=data.draw(st.integers(0, 45)),
        top_p=data.draw(st.sampled_from([0.2, 0.8, 0.95, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 0.5])),
        seed=seed,
    )
    sampler = RowSampler(params, (0,))
    support = oracle_support(logits, params)
    assert {sampler.draw(DenseScores(logits), t).token_id for t in range(60)} <= support


@given(seed=st.integers(0, 1 << 30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_candidates_give_the_token_and_logprobs_that_all_logits_give(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    scores = DenseScores(np.round(rng.normal(0, 2, 300), 1).astype(np.float32))
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.6])),
        top_k=data.draw(st.integers(1, NUM_CANDIDATES)),
        top_p=data.draw(st.sampled_from([0.4, 0.9, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.1])),
        seed=seed,
        top_logprobs=data.draw(st.sampled_from([None, 0, 5])),
    )
    sampler = RowSampler(params, (0,))
    assert not sampler.needs_dense
    narrow = candidates(scores)
    for t in range(5):
        assert sampler.draw(scores, t) == sampler.draw(narrow, t)
    if params.temperature:
        alone = [sampler.draw(narrow, t).token_id for t in range(5)]
        assert draw_ahead([sampler], [0], [[0] * 4], block(narrow, 5)) == [alone]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=NUM_CANDIDATES + 1),
        SamplingParams(temperature=1.1, top_p=0.9),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(top_logprobs=NUM_CANDIDATES + 1),
    ],
)
def test_rows_that_candidates_cannot_serve_say_so_and_refuse_them(params: SamplingParams) -> None:
    sampler = RowSampler(params, (0,))
    assert sampler.needs_dense
    with pytest.raises(ValueError, match="candidates cannot serve"):
        sampler.draw(candidates(dense(*range(100))), 0)


def test_large_vocabulary_nucleus_equals_a_full_sort() -> None:
    """The prefix is first looked for among 1024 tokens; a flat distribution needs more."""
    rng = np.random.default_rng(2)
    for scale in (0.01, 3.0):
        logits = rng.normal(0, scale, 5000).astype(np.float32)
        params = SamplingParams(temperature=1.0, top_p=0.7, seed=1)
        support = oracle_support(logits, params)
        sampler = RowSampler(params, (0,))
        seen = {sampler.draw(DenseScores(logits), t).token_id for t in range(200)}
        assert seen <= support
        if scale < 1:
            assert len(support) > 1024
            assert len(seen - set(top_indices(logits, 1024).tolist())) > 50


def test_draws_are_a_function_of_seed_and_position_alone() -> None:
    scores = dense(*np.zeros(50))
    first, second = (RowSampler(SamplingParams(temperature=1.0, seed=8), (0,)) for _ in range(2))
    forward = [first.draw(scores, t).token_id for t in range(40)]
    backward = [second.draw(scores, t).token_id for t in reversed(range(40))]
    assert forward == backward[::-1]
    other = RowSampler(SamplingParams(temperature=1.0, seed=9), (0,))
    assert [other.draw(scores, t).token_id for t in range(40)] != forward


def test_a_draft_from_the_same_scores_is_the_rows_own_token() -> None:
    scores = dense(*np.linspace(0, 2, 50))
    sampler = RowSampler(SamplingParams(temperature=1.0, top_k=20, seed=8), (0,))
    for t in range(50):
        assert sampler.draft(scores, t) == sampler.draw(scores, t).token_id


# Penalties


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    sampler = RowSampler(SamplingParams(repetition_penalty=2.0), (0,))
    assert sampler.draw(dense(3.0, 2.0, -1.0), 1).token_id == 1  # 3 / 2 < 2
    sampler.commit(1)
    assert sampler.draw(dense(3.0, 2.0, 1.2), 2).token_id == 0  # 1.5, 1.0, 1.2
    assert sampler.draw(dense(-1.0, -1.1, -2.1), 2).token_id == 0  # -2, -2.2, -2.1


def test_frequency_penalty_grows_with_each_use_and_ignores_the_prompt() -> None:
    sampler = RowSampler(SamplingParams(frequency_penalty=1.0), (0, 0, 0))
    scores = dense(3.0, 1.5)
    tokens = []
    for t in range(6):
        tokens.append(sampler.draw(scores, t).token_id)
        sampler.commit(tokens[-1])
    assert tokens == [0, 0, 1, 0, 1, 0]


def test_presence_penalty_counts_once() -> None:
    sampler = RowSampler(SamplingParams(presence_penalty=1.0), (0,))
    for _ in range(5):
        sampler.commit(0)
    assert sampler.draw(dense(3.0, 1.9), 5).token_id == 0
    assert sampler.draw(dense(3.0, 2.1), 5).token_id == 1


def test_logit_bias_can_force_and_forbid() -> None:
    scores = dense(5.0, 1.0, 0.0)
    assert drawn(scores, temperature=1.0, logit_bias={2: 100.0}) == {2}  # type: ignore[arg-type]
    assert 0 not in drawn(scores, temperature=1.0, logit_bias={0: -100.0})  # type: ignore[arg-type]


def test_penalties_come_before_the_filters() -> None:
    """With top_k 1 the penalised best is drawn, not the raw best."""
    sampler = RowSampler(SamplingParams(temperature=1.0, top_k=1, presence_penalty=2.0), (0,))
    sampler.commit(0)
    assert sampler.draw(dense(3.0, 2.0), 1).token_id == 1


def test_the_callers_logits_are_left_alone() -> None:
    scores = dense(3.0, 2.0, 1.0)
    before = scores.logits.copy()
    sampler = RowSampler(SamplingParams(temperature=1.0, repetition_penalty=2.0, top_p=0.5, logit_bias={1: 2.0}), (0,))
    sampler.draw(scores, 0)
    assert np.array_equal(scores.logits, before)


# Log-probabilities


def test_logprobs_are_of_the_raw_distribution_whatever_is_filtered() -> None:
    scores = dense(*np.log([0.5, 0.3, 0.2]))
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={2: 50.0}, top_logprobs=2)
    draw = RowSampler(params, (0,)).draw(scores, 0)
    assert draw.token_id == 2
    assert draw.logprobs is not None
    assert draw.logprobs.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [i for i, _ in draw.logprobs.top] == [0, 1]
    assert [v for _, v in draw.logprobs.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)


def test_zero_top_logprobs_still_gives_the_tokens_own() -> None:
    draw = RowSampler(SamplingParams(top_logprobs=0), (0,)).draw(dense(0.0, 0.0), 0)
    assert draw.logprobs is not None
    assert draw.logprobs.top == ()
    assert draw.logprobs.logprob == pytest.approx(math.log(0.5))


# Bad numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
)
def test_scores_that_are_not_numbers_fail_the_row(bad: float, params: SamplingParams) -> None:
    with pytest.raises(RowError, match="not numbers"):
        RowSampler(params, (0,)).draw(dense(1.0, bad, 0.0), 0)


def test_bad_candidates_fail_the_row() -> None:
    scores = CandidateScores(np.array([math.nan, 1.0], np.float32), np.array([0, 1]), 1.0)
    sampler = RowSampler(SamplingParams(temperature=1.0, top_k=2), (0,))
    with pytest.raises(RowError):
        sampler.draw(scores, 0)
    assert draw_ahead([sampler], [0], [[]], block(scores, 1)) == [None]


def test_a_forbidden_token_may_have_minus_infinity() -> None:
    assert drawn(dense(1.0, -math.inf, 0.0), temperature=1.0) == {0, 2}


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("temperature", SamplingParams(temperature=-0.1)),
        ("temperature", SamplingParams(temperature=math.nan)),
        ("top_p", SamplingParams(top_p=0.0)),
        ("top_p", SamplingParams(top_p=1.1)),
        ("top_k", SamplingParams(top_k=-1)),
        ("min_p", SamplingParams(min_p=math.nan)),
        ("repetition_penalty", SamplingParams(repetition_penalty=0.0)),
        ("frequency_penalty", SamplingParams(frequency_penalty=math.inf)),
        ("presence_penalty", SamplingParams(presence_penalty=math.nan)),
        ("seed", SamplingParams(seed=-1)),
        ("top_logprobs", SamplingParams(top_logprobs=101)),
        ("logit_bias", SamplingParams(logit_bias={100: 1.0})),
        ("logit_bias", SamplingParams(logit_bias={1: math.nan})),
    ],
)
def test_parameters_that_no_sampler_can_serve_are_named(field: str, params: SamplingParams) -> None:
    with pytest.raises(RequestError) as caught:
        check_params(params, vocab_size=100)
    assert caught.value.field == field


def test_good_parameters_pass() -> None:
    check_params(SamplingParams(temperature=2.0, top_p=1.0, logit_bias={99: -100.0}, top_logprobs=20), vocab_size=100)
