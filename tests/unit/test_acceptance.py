"""The walk over verify positions: what is emitted, what counts as accepted, where it ends."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm_worker.engine.api import SamplingParams
from edgellm_worker.engine.errors import RowError
from edgellm_worker.engine.runtime.acceptance import Verified, accept, accept_rows
from edgellm_worker.engine.runtime.sampling import (
    CandidateScores,
    DenseScores,
    RowSampler,
    Scores,
    log_sum_exp,
    top_indices,
)

NO_STOPS: frozenset[int] = frozenset()


def one_hot(token_id: int, size: int = 10) -> DenseScores:
    logits = np.zeros(size, np.float32)
    logits[token_id] = 9.0
    return DenseScores(logits)


def greedy(
    tokens: list[int], drafts: list[int], *, stop_ids: frozenset[int] = NO_STOPS, max_tokens: int = 99
) -> tuple[list[int], int]:
    accepted = accept(
        RowSampler(SamplingParams(), (0,)),
        [one_hot(t) for t in tokens],
        drafts,
        5,
        stop_ids=stop_ids,
        max_tokens=max_tokens,
    )
    return [draw.token_id for draw in accepted.draws], accepted.num_accepted


@pytest.mark.parametrize(
    ("tokens", "drafts", "emitted", "num_accepted"),
    [
        ([4], [], [4], 0),
        ([4, 5, 6], [4, 5], [4, 5, 6], 2),  # all agree: the bonus follows
        ([4, 5, 6], [4, 7], [4, 5], 1),  # the first that differs is the row's own
        ([4, 5, 6], [7, 5], [4], 0),  # what agrees behind a difference does not count
    ],
)
def test_drafts_are_accepted_up_to_the_first_difference(
    tokens: list[int], drafts: list[int], emitted: list[int], num_accepted: int
) -> None:
    assert greedy(tokens, drafts) == (emitted, num_accepted)


def test_nothing_follows_an_eos_inside_the_accepted_drafts() -> None:
    assert greedy([4, 5, 6], [4, 5], stop_ids=frozenset({4})) == ([4], 1)
    assert greedy([4, 5, 6], [4, 7], stop_ids=frozenset({5, 9})) == ([4, 5], 1)
    assert greedy([4, 5, 6], [4, 5], stop_ids=frozenset({6})) == ([4, 5, 6], 2)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_max_tokens_cuts_exactly(max_tokens: int) -> None:
    emitted, num_accepted = greedy([4, 5, 6, 7], [4, 5, 6], max_tokens=max_tokens)
    assert emitted == [4, 5, 6, 7][:max_tokens]
    assert num_accepted == min(max_tokens, 3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 scores for 2 drafts"):
        greedy([4, 5], [4, 5])
    with pytest.raises(ValueError, match="0 tokens left"):
        greedy([4], [], max_tokens=0)


def test_bad_numbers_behind_a_rejected_draft_do_not_matter() -> None:
    bad = DenseScores(np.full(10, math.nan, np.float32))
    sampler = RowSampler(SamplingParams(), (0,))
    accepted = accept(sampler, [one_hot(4), bad], [7], 0, stop_ids=NO_STOPS, max_tokens=9)
    assert accepted.num_accepted == 0
    with pytest.raises(RowError):
        accept(sampler, [one_hot(4), bad], [4], 0, stop_ids=NO_STOPS, max_tokens=9)


def test_penalties_see_the_tokens_accepted_earlier_in_the_same_step() -> None:
    """Every position prefers token 0 by one; a presence penalty of 2 makes the row move on after each use."""
    scores = DenseScores(np.array([3.0, 2.0, 1.5], np.float32))
    sampler = RowSampler(SamplingParams(presence_penalty=2.0), (0,))
    accepted = accept(sampler, [scores] * 3, [0, 1], 0, stop_ids=NO_STOPS, max_tokens=9)
    assert [draw.token_id for draw in accepted.draws] == [0, 1, 2]
    assert accepted.num_accepted == 2


def random_scores(rng: np.random.Generator, *, narrow: bool) -> list[Scores]:
    made: list[Scores] = []
    for _ in range(200):
        logits = rng.normal(0, 1.5, 80).astype(np.float32)
        ids = top_indices(logits, 64)
        made.append(CandidateScores(logits[ids], ids, log_sum_exp(logits)) if narrow else DenseScores(logits))
    return made


@given(
    seed=st.integers(0, 1000),
    narrow=st.booleans(),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    penalty=st.sampled_from([0.0, 1.5]),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_text_is_the_same_whatever_is_drafted(
    seed: int, narrow: bool, temperature: float, penalty: float, lengths: list[int]
) -> None:
    """Scores that depend on the position only: any drafts, of any number, leave the row's tokens alone."""
    rng = np.random.default_rng(seed)
    narrow = narrow and not penalty
    scores = random_scores(rng, narrow=narrow)
    params = SamplingParams(temperature=temperature, top_k=20, frequency_penalty=penalty, seed=seed, top_logprobs=2)
    plain, row = RowSampler(params, (0,)), RowSampler(params, (0,))
    expected, drafted, step = [], [], 0
    while len(expected) < 60:
        expected += accept(
            plain, scores[len(expected) :][:1], [], len(expected), stop_ids=NO_STOPS, max_tokens=99
        ).draws
    while len(drafted) < 60:
        k, at = lengths[step % len(lengths)], len(drafted)
        guesses = [d.token_id if rng.random() < 0.7 else int(rng.integers(80)) for d in expected[at : at + k]]
        drafted += accept(
            row, scores[at : at + len(guesses) + 1], guesses, at, stop_ids=NO_STOPS, max_tokens=60 - at
        ).draws
        step += 1
    assert drafted == expected


def test_rows_of_one_step_taken_together_equal_rows_taken_alone() -> None:
    """Greedy, sampled with different filters, penalised, dense, and one whose scores are not numbers, in one step."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1),
        SamplingParams(temperature=1.3, top_k=64, min_p=0.05, seed=2),
        SamplingParams(temperature=1.0, top_k=5, seed=3, top_logprobs=3),
        SamplingParams(temperature=1.0, top_k=5, presence_penalty=1.0, seed=4),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, top_k=5, seed=6),
    ]
    rng = np.random.default_rng(4)
    num_accepted = 0
    for step in range(40):
        rows = []
        for i, p in enumerate(params):
            sampler = RowSampler(p, (0,))
            scores = random_scores(rng, narrow=not sampler.needs_dense)[:4]
            guesses = [
                int(rng.integers(80)) if rng.random() < 0.3 else sampler.draft(scores[j], step + j) for j in range(3)
            ]
            if i == 6:
                scores[1] = CandidateScores(np.full(64, math.nan, np.float32), scores[1].ids, 0.0)
                guesses[0] = sampler.draft(scores[0], step)
            rows.append(Verified(sampler, scores, guesses, step, NO_STOPS, 9))
        together = accept_rows(rows)
        assert isinstance(together[6], RowError)
        for row, p, outcome in zip(rows[:6], params, together, strict=False):
            alone = accept(RowSampler(p, (0,)), row.scores, row.drafts, step, stop_ids=NO_STOPS, max_tokens=9)
            assert outcome == alone
            num_accepted += alone.num_accepted
    assert num_accepted > 200
