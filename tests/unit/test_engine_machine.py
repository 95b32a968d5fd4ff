"""Random joins, leaves, cancels and draft-length changes: every row's text is that of its solo run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgellm_worker.engine.api import FinishReason, GenerationRequest, SamplingParams
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine
from tests.support.tiny_engine import (
    EagerExecutor,
    FollowingExecutor,
    ScriptedDraftLength,
    WatchedExecutor,
    greedy,
    sampled,
    script_drafts,
    short_prompts,
    tiny_engine,
    updates_of,
    watch,
)

MAX_BATCH = 3
MAX_DRAFTS = 4
CHUNK = 16
"""Small, so that prompts take several steps to be read."""

PROMPTS = tuple(sorted(short_prompts(), key=lambda prompt: len(prompt.prompt_ids)))[:6]
REQUESTS: tuple[GenerationRequest, ...] = (
    *(greedy(prompt, length) for prompt, length in zip(PROMPTS, (1, 9, 17, 24, 12, 20), strict=True)),
    *(sampled(prompt, seed, length) for seed, (prompt, length) in enumerate(zip(PROMPTS, (9, 17, 13), strict=False))),
    replace(greedy(PROMPTS[1], 15), sampling=SamplingParams(logit_bias={5: 1.0})),  # all scores, not candidates alone
)


@cache
def solo(index: int) -> tuple[tuple[int, ...], FinishReason | None]:
    """Alone, in one chunk, without drafts."""
    updates = updates_of(tiny_engine(1, 0, capacity=256), REQUESTS[index])
    return tuple(token for update in updates for token in update.token_ids), updates[-1].finish_reason


@cache
def shared(kind: type[WatchedExecutor]) -> tuple[SpeculativeEngine, ScriptedDraftLength]:
    """One engine for all examples: its slots are reused, dirty, from one to the next."""
    engine = tiny_engine(MAX_BATCH, MAX_DRAFTS, capacity=256, chunk=CHUNK)
    watch(engine, kind)
    return engine, script_drafts(engine, (MAX_DRAFTS,))


class Rows(RuleBasedStateMachine):
    kind: type[WatchedExecutor] = WatchedExecutor
    next_row_id = 0

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.script = shared(self.kind)
        self.script._lengths = (MAX_DRAFTS,)
        self.requests: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    @precondition(lambda self: len(self.requests) < MAX_BATCH)
    @rule(index=st.integers(0, len(REQUESTS) - 1))
    def join(self, index: int) -> None:
        row_id = Rows.next_row_id
        Rows.next_row_id += 1
        self.engine.add(row_id, REQUESTS[index])
        self.requests[row_id], self.tokens[row_id] = index, []

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, MAX_BATCH - 1))
    def leave(self, choice: int) -> None:
        row_id = sorted(self.requests)[choice % len(self.requests)]
        self.engine.remove(row_id)
        self.check_prefix(row_id)
        del self.requests[row_id]

    @rule(length=st.integers(0, MAX_DRAFTS))
    def change_draft_length(self, length: int) -> None:
        self.script._lengths = (length,)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            for update in self.engine.step().updates:
                self.tokens[update.row_id] += update.token_ids
                if update.finish_reason is not None:
                    text, reason = solo(self.requests.pop(update.row_id))
                    assert (tuple(self.tokens[update.row_id]), update.finish_reason) == (text, reason)

    @invariant()
    def the_engine_holds_exactly_the_rows_it_was_given(self) -> None:
        assert self.engine.num_rows == len(self.requests)
        assert [row.slot for row in self.engine._rows.running] == list(range(len(self.engine._rows.running)))

    def check_prefix(self, row_id: int) -> None:
        text, _ = solo(self.requests[row_id])
        assert text[: len(self.tokens[row_id])] == tuple(self.tokens[row_id])

    def teardown(self) -> None:
        for row_id in self.requests:
            self.check_prefix(row_id)
            self.engine.remove(row_id)


Rows.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestRows = Rows.TestCase


class RowsAhead(Rows):
    """The same where the next round runs while the last is reported: joins and leaves fall into rounds under way."""

    kind = EagerExecutor


RowsAhead.TestCase.settings = Rows.TestCase.settings
TestRowsAhead = RowsAhead.TestCase


class RowsTwoAhead(Rows):
    """And where rounds of greedy rows start before the one before is known: what is asked falls into two at once."""

    kind = FollowingExecutor


RowsTwoAhead.TestCase.settings = Rows.TestCase.settings
TestRowsTwoAhead = RowsTwoAhead.TestCase
