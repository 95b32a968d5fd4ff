"""Rounds that run ahead of their reports, and rounds that follow before the one before was read: who is in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.runtime.executor import RoundInput, RoundOutput, StartedRound
from tests.support.tiny_engine import (
    EagerExecutor,
    FollowingExecutor,
    generate,
    greedy,
    short_prompts,
    tiny_engine,
    updates_of,
    watch,
)

PROMPTS = short_prompts()


def test_where_the_executor_runs_by_itself_the_next_round_is_started_before_the_last_is_reported():
    engine = tiny_engine(2, 3)
    watched = watch(engine, EagerExecutor)
    for row_id in range(2):
        engine.add(row_id, greedy(PROMPTS[row_id], 40))
    engine.step()
    tokens: dict[int, list[int]] = {0: [PROMPTS[0].generated_ids[0]], 1: [PROMPTS[1].generated_ids[0]]}
    num_rounds = 0
    while engine.num_rows:
        report = engine.step()
        num_rounds += 1
        assert len(watched.rounds) == num_rounds + bool(engine.num_rows)
        for update in report.updates:
            tokens[update.row_id] += update.token_ids
    assert [tuple(tokens[i]) for i in range(2)] == [PROMPTS[i].generated_ids[:40] for i in range(2)]


def test_a_row_removed_while_its_round_is_under_way_is_not_heard_of_again():
    engine = tiny_engine(3, 3)
    watched = watch(engine, EagerExecutor)
    for row_id in range(3):
        engine.add(row_id, greedy(PROMPTS[row_id], 30))
    engine.step()
    engine.step()
    engine.remove(0)
    assert engine.num_rows == 2
    report = engine.step()
    assert [update.row_id for update in report.updates] == [1, 2]
    assert report.num_rows == 2
    engine.remove(1)
    engine.remove(2)
    engine.add(3, greedy(PROMPTS[3], 20))
    num_rounds = len(watched.rounds)
    assert engine.step().num_prefill_tokens == len(PROMPTS[3].prompt_ids)
    assert len(watched.rounds) == num_rounds
    (text,) = ([token for update in engine.step().updates for token in update.token_ids],)
    assert tuple(text) == PROMPTS[3].generated_ids[1 : 1 + len(text)]


@pytest.mark.parametrize("kind", [EagerExecutor, FollowingExecutor])
def test_a_row_that_joins_is_read_beside_rounds_and_takes_part_in_the_one_after_the_next(kind):
    """Its prompt is not read when the executor is first asked."""
    engine = tiny_engine(2, 3)
    watch(engine, kind)
    engine.add(0, greedy(PROMPTS[0], 60))
    engine.step()
    engine.step()
    engine.add(1, greedy(PROMPTS[1], 8))
    reports = [engine.step() for _ in range(5)]
    assert [report.num_prefill_tokens for report in reports] == [0, 0, len(PROMPTS[1].prompt_ids), 0, 0]
    assert [[update.row_id for update in report.updates] for report in reports] == [[0], [0], [1], [0], [0, 1]]


def test_no_round_waits_for_what_a_joining_row_takes_of_the_host():
    """The round after the one under way is started before its prompt is, and again as soon as its first token is there."""
    engine = tiny_engine(2, 3)
    watched = watch(engine, FollowingExecutor)
    order: list[str] = []
    start_round, start_prefill = watched.start_round, watched.start_prefill
    watched.start_round = lambda *given: order.append("round") or start_round(*given)
    watched.start_prefill = lambda *given: order.append("prompt") or start_prefill(*given)
    engine.add(0, greedy(PROMPTS[0], 60))
    engine.step()
    engine.step()
    order.clear()
    engine.add(1, greedy(PROMPTS[1], 30))
    engine.step()
    assert order == ["round", "prompt"]
    engine.step()
    order.clear()
    assert [update.row_id for update in engine.step().updates] == [1]
    assert order == ["round"]
    assert watched.num_regrouped == 1


def test_a_row_removed_while_its_prompt_is_read_leaves_its_slot_to_the_next():
    engine = tiny_engine(2, 3)
    watch(engine, FollowingExecutor)
    engine.add(0, greedy(PROMPTS[0], 60))
    engine.step()
    engine.add(1, greedy(PROMPTS[1], 8))
    assert [update.row_id for update in engine.step().updates] == [0]
    engine.remove(1)
    engine.add(2, greedy(PROMPTS[2], 12))
    tokens: dict[int, tuple[int, ...]] = {}
    while 2 not in tokens or engine.num_rows > 1:
        for update in engine.step().updates:
            tokens[update.row_id] = tokens.get(update.row_id, ()) + update.token_ids
    assert tokens.keys() == {0, 2}
    assert tokens[2] == PROMPTS[2].generated_ids[:12]


def followed_after(requests: Sequence[GenerationRequest], num_steps: int) -> tuple[int, dict[int, tuple[int, ...]]]:
    """How many rounds followed by themselves, and the texts so far."""
    engine = tiny_engine(3, 3)
    watched = watch(engine, FollowingExecutor)
    tokens: dict[int, tuple[int, ...]] = {}
    for row_id, request in enumerate(requests):
        engine.add(row_id, request)
    for _ in range(num_steps):
        for update in engine.step().updates:
            tokens[update.row_id] = tokens.get(update.row_id, ()) + update.token_ids
    assert isinstance(watched, FollowingExecutor)
    return watched.num_followed, tokens


def test_rounds_of_greedy_rows_follow_before_the_one_before_is_known():
    """The first step reads the prompts, the second has a round under way and one behind it."""
    num_followed, tokens = followed_after([greedy(PROMPTS[i], 60) for i in range(3)], 8)
    assert num_followed == 7
    assert all(tokens[i] == PROMPTS[i].generated_ids[: len(tokens[i])] for i in range(3))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_k=20, seed=1),
        SamplingParams(logit_bias={5: -1.0}),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(top_logprobs=100),
    ],
)
def test_no_round_follows_where_one_row_needs_the_host(params: SamplingParams):
    requests = [greedy(PROMPTS[0], 60), replace(greedy(PROMPTS[1], 60), sampling=params)]
    assert followed_after(requests, 6)[0] == 0


def test_no_round_follows_one_in_which_all_rows_may_end_by_their_length():
    """Four tokens a round at most, and one from the prompt: six leave one more."""
    plain = replace(greedy(PROMPTS[0], 60), eos_token_ids=frozenset())
    short, shorter = replace(plain, max_new_tokens=6), replace(plain, max_new_tokens=5)
    assert followed_after([short, shorter], 2)[0] == 1
    assert followed_after([shorter, shorter], 2)[0] == 0


def test_no_round_follows_at_the_end_of_a_rows_cache():
    """It would start from a position that may have no place, though another row goes on."""
    *_, long = sorted(PROMPTS, key=lambda prompt: len(prompt.prompt_ids))
    ending = replace(greedy(long, 2), eos_token_ids=frozenset())
    going_on = replace(greedy(PROMPTS[0], 12), eos_token_ids=frozenset())
    least = len(long.prompt_ids) + 2 + 3
    for more, num_followed in ((0, 0), (2, 0), (3, 1)):
        engine = tiny_engine(2, 3, capacity=least + more)
        watched = watch(engine, FollowingExecutor)
        engine.add(0, ending)
        engine.add(1, going_on)
        engine.step()
        engine.step()
        assert watched.num_followed == num_followed, more


def test_rows_leave_and_join_between_rounds_that_follow():
    """Three rows of which one ends by its length and one is removed, and two more: no round waits for the host."""
    engine = tiny_engine(3, 3)
    watched = watch(engine, FollowingExecutor)
    tokens: dict[int, tuple[int, ...]] = {}
    lengths = (40, 8, 60, 40, 40)

    def step() -> None:
        for update in engine.step().updates:
            tokens[update.row_id] = tokens.get(update.row_id, ()) + update.token_ids

    for row_id in range(3):
        engine.add(row_id, greedy(PROMPTS[row_id], lengths[row_id]))
    while len(tokens.get(1, ())) < lengths[1]:
        step()
    engine.add(3, greedy(PROMPTS[3], lengths[3]))
    while len(tokens.get(3, ())) < 5:
        step()
    engine.remove(0)
    engine.add(4, greedy(PROMPTS[4], lengths[4]))
    before, num_followed = len(watched.rounds), watched.num_followed
    while len(tokens.get(4, ())) < 5:
        step()
    assert len(watched.rounds) - before == watched.num_followed - num_followed
    assert watched.num_regrouped == 4
    while engine.num_rows:
        step()
    assert all(tokens[i] == PROMPTS[i].generated_ids[: len(tokens[i])] for i in range(5))
    assert [len(tokens[i]) for i in range(1, 5)] == list(lengths[1:])


def test_a_row_that_needs_all_scores_is_removed_beside_rows_that_do_not():
    """A round of the others follows, and the removed row's part of the one before is not looked at any more."""
    engine = tiny_engine(2, 3)
    watched = watch(engine, FollowingExecutor)
    engine.add(0, greedy(PROMPTS[0], 40))
    engine.add(1, replace(greedy(PROMPTS[1], 40), sampling=SamplingParams(logit_bias={5: 1.0})))
    tokens: tuple[int, ...] = ()
    for _ in range(3):
        tokens += sum((update.token_ids for update in engine.step().updates if update.row_id == 0), ())
    assert not watched.num_followed
    engine.remove(1)
    while engine.num_rows:
        tokens += sum((update.token_ids for update in engine.step().updates), ())
    assert tokens == PROMPTS[0].generated_ids[:40]
    assert watched.num_followed > 3


def test_log_probabilities_are_those_of_rounds_that_wait_for_the_host():
    params = SamplingParams(top_logprobs=2)
    request = replace(greedy(PROMPTS[0], 30), sampling=params)
    waiting, following = tiny_engine(1, 3), tiny_engine(1, 3)
    watched = watch(following, FollowingExecutor)
    assert updates_of(following, request) == updates_of(waiting, request)
    assert watched.num_followed > 4


def test_an_executor_that_goes_on_from_something_else_is_found_out():
    class Mistaken(FollowingExecutor):
        def advanced(self, batch: RoundInput, drafts: np.ndarray, best: np.ndarray) -> RoundInput:
            right = super().advanced(batch, drafts, best)
            return replace(right, commit=right.commit - 1)

    engine = tiny_engine(1, 3)
    watch(engine, Mistaken)
    engine.add(0, greedy(PROMPTS[0], 60))
    engine.step()
    engine.step()
    with pytest.raises(EngineError, match="row 0: the executor went on from"):
        engine.step()


def test_a_round_that_fails_leaves_an_engine_that_others_can_use():
    """The one that followed it is forgotten with it."""

    class Failing(FollowingExecutor):
        def start_round(self, *order: Any) -> StartedRound:
            wait = super().start_round(*order)

            def failing() -> RoundOutput:
                raise EngineError("cuEventSynchronize")

            return failing if self.num_followed == 2 else wait

    engine = tiny_engine(2, 3)
    watched = watch(engine, Failing)
    for row_id in range(2):
        engine.add(row_id, greedy(PROMPTS[row_id], 60))
    for _ in range(3):
        engine.step()
    with pytest.raises(EngineError, match="cuEventSynchronize"):
        engine.step()
    assert watched.num_followed == 3
    for row_id in range(2):
        engine.remove(row_id)
    assert generate(engine, [greedy(PROMPTS[i], 20) for i in (2, 3)]) == [PROMPTS[i].generated_ids[:20] for i in (2, 3)]
