"""The walk over verify positions: what is emitted, what counts as accepted, where it ends."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm_worker.engine.api import GenerationRequest, SamplingParams, TokenLogprobs
from edgellm_worker.engine.errors import RowError
from edgellm_worker.engine.runtime.acceptance import Accepted, accept, accept_rows
from edgellm_worker.engine.runtime.rows import Row
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import (
    Candidates,
    CandidateScores,
    DenseScores,
    RoundScores,
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
    return list(accepted.token_ids), accepted.num_accepted


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
    assert accepted.token_ids == (0, 1, 2)
    assert accepted.num_accepted == 2


def random_scores(rng: np.random.Generator, *, narrow: bool) -> list[Scores]:
    made: list[Scores] = []
    for _ in range(200):
        logits = rng.normal(0, 1.5, 80).astype(np.float32)
        ids = top_indices(logits, 64)
        made.append(CandidateScores(logits[ids], ids, log_sum_exp(logits)) if narrow else DenseScores(logits))
    return made


def outcome(sampler: RowSampler, accepted: Accepted) -> list[tuple[int, TokenLogprobs]]:
    """Tokens with their log-probabilities."""
    return list(zip(accepted.token_ids, sampler.logprobs(accepted.token_ids, accepted.scores), strict=True))


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
        at = len(expected)
        expected += outcome(plain, accept(plain, scores[at:][:1], [], at, stop_ids=NO_STOPS, max_tokens=99))
    while len(drafted) < 60:
        k, at = lengths[step % len(lengths)], len(drafted)
        guesses = [token if rng.random() < 0.7 else int(rng.integers(80)) for token, _ in expected[at : at + k]]
        found = accept(row, scores[at : at + len(guesses) + 1], guesses, at, stop_ids=NO_STOPS, max_tokens=60 - at)
        drafted += outcome(row, found)
        step += 1
    assert drafted == expected


PARAMS = {
    "greedy": SamplingParams(top_logprobs=2),
    "top_k and top_p": SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1),
    "top_k and min_p": SamplingParams(temperature=1.3, top_k=64, min_p=0.05, seed=2),
    "log-probabilities": SamplingParams(temperature=1.0, top_k=5, seed=3, top_logprobs=3),
    "top_p alone": SamplingParams(temperature=0.7, top_p=0.8, seed=4, top_logprobs=64),
    "top_p alone at 1": SamplingParams(temperature=1.0, top_p=0.5, seed=5),
    "min_p alone": SamplingParams(temperature=1.3, min_p=0.2, seed=6),
    "plain": SamplingParams(temperature=1.0, seed=7),
    "hot top_p": SamplingParams(temperature=1.5, top_p=0.6, seed=8),
    "wide log-probabilities": SamplingParams(top_logprobs=65),
    "greedy, presence": SamplingParams(presence_penalty=1.0),
    "frequency": SamplingParams(temperature=1.0, top_k=5, frequency_penalty=0.7, seed=9, top_logprobs=2),
    "repetition": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.4, seed=10),
    "repetition, top_p alone": SamplingParams(temperature=0.5, top_p=0.7, repetition_penalty=1.4, seed=11),
    "reward": SamplingParams(temperature=1.0, top_k=5, presence_penalty=-1.0, seed=12),
    "bias": SamplingParams(temperature=1.0, top_k=5, logit_bias={3: -100.0, 5: -2.0}, seed=13),
    "forcing bias": SamplingParams(temperature=1.0, top_k=5, logit_bias={3: 100.0}, seed=14),
}


class Step:
    """Random logits [B, N, V] of one round, as candidates with the logits behind them, and what was read of those."""

    def __init__(self, rng: np.random.Generator, num_rows: int, num_positions: int, scale: float) -> None:
        self.logits = np.round(rng.normal(0, scale, (num_rows, num_positions, 300)), 1).astype(np.float32)
        order = np.argsort(-self.logits, axis=-1, kind="stable")[:, :, :64]
        sums = np.array([[log_sum_exp(x) for x in row] for row in self.logits], np.float32)
        values = np.take_along_axis(self.logits, order, axis=-1)
        self.read: set[int] = set()
        self.scores = RoundScores(num_positions, Candidates(values, order.astype(np.int32), sums), self.read_logits)

    def read_logits(self, row: int, position: int) -> np.ndarray:
        self.read.add(row)
        return self.logits[row, position]

    def poison(self, row: int, position: int) -> None:
        self.logits[row, position] = np.nan
        self.scores.candidates.values[row, position] = np.nan  # type: ignore[union-attr]


def rows_of(step: int) -> list[Row]:
    made = []
    for slot, params in enumerate(PARAMS.values()):
        row = Row(slot, GenerationRequest((0, 3), 99, params), RowSampler(params, (0, 3)), slot)
        row.position = step
        made.append(row)
    return made


def guesses_of(rng: np.random.Generator, params: SamplingParams, logits: np.ndarray, step: int) -> list[int]:
    """Mostly the row's own tokens, so that long runs are accepted."""
    sampler, guesses = RowSampler(params, (0, 3)), []
    for i, position in enumerate(logits[:-1]):
        guesses.append(sampler.draw(DenseScores(position), step + 1 + i).token_id)
        sampler.commit(guesses[-1])
    return [int(rng.integers(300)) if rng.random() < 0.15 else guess for guess in guesses]


@pytest.mark.parametrize("scale", [0.7, 2.0, 4.0])
def test_rows_of_one_step_taken_together_equal_rows_taken_alone_from_all_logits(scale: float) -> None:
    """From a nearly flat to a peaked distribution: from candidates none of which decides much to ones that decide all."""
    rng = np.random.default_rng(4)
    num_accepted = 0
    for step in range(30):
        made = Step(rng, len(PARAMS), 4, scale)
        rows = rows_of(step)
        drafts = np.array(
            [guesses_of(rng, row.request.sampling, made.logits[row.slot], step) for row in rows], np.int32
        )
        for row, found in zip(rows, accept_rows(rows, drafts, made.scores), strict=True):
            assert isinstance(found, Accepted)
            sampler = RowSampler(row.request.sampling, (0, 3))
            dense = [DenseScores(logits) for logits in made.logits[row.slot]]
            guesses = drafts[row.slot].tolist()
            alone = accept(sampler, dense, guesses, step + 1, stop_ids=NO_STOPS, max_tokens=99)
            assert (found.token_ids, found.num_accepted) == (alone.token_ids, alone.num_accepted)
            num_accepted += alone.num_accepted
            if sampler.wants_logprobs:
                own = row.sampler.logprobs(found.token_ids, found.scores)
                for one, other in zip(own, sampler.logprobs(alone.token_ids, alone.scores), strict=True):
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                    assert [i for i, _ in one.top] == [i for i, _ in other.top]
                    assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-5)
    assert num_accepted > 600


def test_logits_are_read_only_for_rows_that_candidates_cannot_decide() -> None:
    rng = np.random.default_rng(5)
    always = {"plain", "hot top_p", "wide log-probabilities", "reward", "forcing bias"}
    for step in range(10):
        made, rows = Step(rng, len(PARAMS), 4, 4.0), rows_of(step)
        accept_rows(rows, np.zeros((len(rows), 3), np.int32), made.scores)
        assert {list(PARAMS)[row] for row in made.read} == always


def test_a_row_whose_scores_are_not_numbers_fails_alone_and_only_when_it_gets_there() -> None:
    rng = np.random.default_rng(6)
    for step in range(10):
        made, rows = Step(rng, len(PARAMS), 2, 3.0), rows_of(step)
        own = [guesses_of(np.random.default_rng(0), row.request.sampling, made.logits[row.slot], step) for row in rows]
        drafts = np.array([guess if row.slot % 2 else [299 - guess[0]] for row, guess in zip(rows, own, strict=True)])
        for row in rows:
            made.poison(row.slot, 1)
        for row, guess, outcome in zip(rows, own, accept_rows(rows, drafts, made.scores), strict=True):
            assert isinstance(outcome, RowError) == (drafts[row.slot, 0] == guess[0])
