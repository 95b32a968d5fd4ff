"""The engine: one loop of drafting, verifying, accepting and committing over whatever runs the model.

A step is one of two things.

    prefill   up to `prefill_chunk_tokens` prompt tokens, first come first served; a row whose prompt ends draws its
              first token and starts running
    round     every running row drafts, is verified together with the others, accepts, and commits 1 to K+1 tokens

While both have work they alternate, so a long prompt never stops rows that run; where the executor runs by itself
prompts are read beside rounds, and the step that finds a piece read reports it. The draft length is chosen anew for
each round, and every round folds what the one before committed, so it may be anything from 0 to the most reserved.

Where the executor runs by itself, the next round is started as soon as the tokens of the last are known, and the
report is made while it runs. Where it can also tell by itself what greedy rows accept, the next round follows before
the tokens of the last are known. They are settled here all the same, and what the executor went by is held against
that. What is asked in between acts as it always does: a row that ended or was removed is gone, and what its part of the
rounds under way gives is dropped; a row that was added joins after the round under way.

Rows are independent: each has its own sampler, its noise depends on its seed and positions alone, and one whose scores
are not numbers fails by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgellm_worker.engine.api import (
    EngineLimits,
    EngineTraits,
    FinishReason,
    GenerationRequest,
    Phase,
    RowUpdate,
    StepReport,
)
from edgellm_worker.engine.errors import EngineError, RequestError, RowError
from edgellm_worker.engine.runtime.acceptance import Accepted, accept_rows
from edgellm_worker.engine.runtime.draft_length import DraftLength, StepObservation
from edgellm_worker.engine.runtime.executor import (
    Executor,
    PrefillChunk,
    RoundInput,
    RoundOutput,
    StartedPrefill,
    StartedRound,
)
from edgellm_worker.engine.runtime.grammar import GrammarCompiler
from edgellm_worker.engine.runtime.rows import Row, RowTable
from edgellm_worker.engine.runtime.rules import SpeculativeRules
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import RoundScores

_NO_DRAFTS: Final = np.zeros((1, 0), np.int32)


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """What the loop needs beside the executor. `grammars` None: this engine has no structured output."""

    limits: EngineLimits
    traits: EngineTraits
    draft_length: DraftLength
    prefill_chunk_tokens: int = 128
    grammars: GrammarCompiler | None = None


@dataclass(frozen=True, slots=True)
class _Round:
    """A round under way: of these rows, in the order of their slots when it was started."""

    rows: tuple[Row, ...]
    num_drafts: int
    wait: StartedRound


@dataclass(frozen=True, slots=True)
class _Reading:
    """A piece of a row's prompt under way."""

    row: Row
    num_tokens: int
    prefill: StartedPrefill


class SpeculativeEngine:
    """`Engine` over an `Executor`, which it owns and closes."""

    def __init__(self, executor: Executor, options: SpeculativeOptions) -> None:
        self._executor = executor
        self._options = options
        self._rules = SpeculativeRules(options.limits)
        self._rows = RowTable(executor.num_slots, executor.swap)
        self._is_prefill_turn = True
        self._under_way: deque[_Round] = deque()  # two at most: the second follows before the first is known
        self._reading: _Reading | None = None

    @property
    def limits(self) -> EngineLimits:
        return self._options.limits

    @property
    def traits(self) -> EngineTraits:
        return self._options.traits

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self._rules.compat_key(request)

    def validate(self, request: GenerationRequest) -> None:
        self._rules.validate(request)
        if request.grammar is not None and self._options.grammars is None:
            raise RequestError("response_format", "this engine has no structured output", code="unsupported_field")

    def add(self, row_id: int, request: GenerationRequest) -> None:
        self.validate(request)
        if row_id in self._rows:
            raise RequestError("row_id", f"{row_id} is already running")
        compiler = self._options.grammars
        grammar = compiler.grammar(request) if compiler is not None and request.grammar is not None else None
        self._rows.add(row_id, request, RowSampler(request.sampling, request.prompt_token_ids, grammar))

    def remove(self, row_id: int) -> None:
        self._rows.remove(row_id)

    def close(self) -> None:
        self._executor.close()

    def step(self) -> StepReport:
        self._drop_what_nobody_waits_for()
        return self._prefill_step() if self._is_prefill_due() else self._round_step()

    def _drop_what_nobody_waits_for(self) -> None:
        """All its rows were removed."""
        while self._under_way and not self._rows.running:
            self._under_way.popleft().wait()
        if self._reading is not None and not self._rows.holds(self._reading.row):
            reading, self._reading = self._reading, None
            reading.prefill.wait()

    # --- prefill ---

    def _is_prefill_due(self) -> bool:
        """By turns with rounds; where the executor runs by itself, when there is something read."""
        rows = self._rows
        if not rows.prefilling:
            self._is_prefill_turn = True
            return False
        if not self._executor.runs_ahead:
            is_due = self._is_prefill_turn or not rows.running
            self._is_prefill_turn = not is_due
            return is_due
        return not rows.running or (self._reading is not None and self._reading.prefill.is_over())

    def _prefill_step(self) -> StepReport:
        """One piece where rows run beside it, else the next prompts too."""
        rows, num_rows, is_beside = self._rows, len(self._rows), self._executor.runs_ahead and bool(self._rows.running)
        left, sample_s, prefill_s = self._options.prefill_chunk_tokens, 0.0, 0.0
        updates: list[RowUpdate] = []
        while left and rows.prefilling and not (is_beside and updates):
            reading, self._reading = self._reading or self._start_reading(left), None
            output = reading.prefill.wait()
            began = time.perf_counter()
            reading.row.num_prefilled += reading.num_tokens
            left -= reading.num_tokens
            if output.scores is not None:
                updates.append(self._first_token(reading.row, output.scores))
            prefill_s += output.prefill_s
            sample_s += time.perf_counter() - began
        if is_beside:
            self._follow_last()
        phase_s = {Phase.PREFILL: prefill_s, Phase.SAMPLE: sample_s}
        num_tokens = self._options.prefill_chunk_tokens - left
        return self._report(updates, num_rows, phase_s, num_prefill_tokens=num_tokens)

    def _start_reading(self, most: int) -> _Reading:
        row = self._rows.prefilling[0]
        if not row.num_prefilled:
            self._executor.clear(row.slot)
        chunk = _next_chunk(row, most)
        return _Reading(row, len(chunk.ids), self._executor.start_prefill(row.slot, chunk))

    def _first_token(self, row: Row, scores: RoundScores) -> RowUpdate:
        self._rows.start(row)
        (accepted,) = accept_rows([row], _NO_DRAFTS, scores)
        reason = self._settle(row, accepted)
        row.commit = 0
        return _update(row, accepted, reason, is_verify=False)

    # --- rounds ---

    def _round_step(self) -> StepReport:
        if not self._under_way and not self._start_round():
            return self._report([], 0, {})
        self._follow_last()
        self._read_beside()
        current = self._under_way.popleft()
        output = current.wait()
        began = time.perf_counter()
        self._require_agreement(current.rows, output.followed)
        accepted = accept_rows(current.rows, output.drafts, output.scores)
        settled = [
            (row, a, self._settle(row, a))
            for row, a in zip(current.rows, accepted, strict=True)
            if self._rows.holds(row)
        ]
        sample_s = time.perf_counter() - began
        self._options.draft_length.observe(_observation(accepted, current.num_drafts, output, sample_s))
        if not self._under_way and self._executor.runs_ahead:
            self._start_round()
        updates = [_update(*row, num_drafted=current.num_drafts) for row in settled]
        phase_s = {Phase.DRAFT: output.draft_s, Phase.VERIFY: output.verify_s, Phase.SAMPLE: sample_s}
        num_rows = len(settled) + len(self._rows.prefilling)
        return self._report(updates, num_rows, phase_s, num_speculative_tokens=current.num_drafts)

    def _start_round(self) -> bool:
        """Of every running row; False when there is none."""
        rows = tuple(self._rows.running)
        if rows:
            num_drafts = self._num_drafts(len(rows))
            start = self._executor.start_round
            wait = start(_round_input(rows), num_drafts, [row.draft for row in rows])
            self._under_way.append(_Round(rows, num_drafts, wait))
        return bool(rows)

    def _follow_last(self) -> None:
        """The round after the only one under way, of the rows that run by now, unless the host must first see what that
        gives: rows draw by more than the best score (a removed one too: its scores are still looked at) or come to the
        end of their cache, or all may have ended.
        """
        if not self._executor.follows or len(self._under_way) != 1:
            return
        last, rows, limits = self._under_way[0], tuple(self._rows.running), self._options.limits
        num_tokens = last.num_drafts + 1
        places = {row: place for place, row in enumerate(last.rows)}
        staying, joining = ([row for row in rows if (row in places) is stays] for stays in (True, False))
        last_position = limits.max_kv_cache_capacity - num_tokens - limits.num_speculative_tokens - 1
        is_plain = all(row.sampler.is_plain for row in last.rows)
        has_room = all(row.position <= last_position for row in staying)
        if not (is_plain and has_room and any(row.surely_outlives(num_tokens) for row in staying)):
            return
        num_drafts = self._num_drafts(len(rows))
        follow = self._executor.follow_round
        wait = follow(num_drafts, [places.get(row) for row in rows], _round_input(joining) if joining else None)
        self._under_way.append(_Round(rows, num_drafts, wait))

    def _read_beside(self) -> None:
        """The next piece of a prompt, while rounds run: after the round that they are to run next."""
        if self._executor.runs_ahead and self._rows.prefilling and self._reading is None:
            self._reading = self._start_reading(self._options.prefill_chunk_tokens)

    def _num_drafts(self, num_rows: int) -> int:
        most = self._options.limits.num_speculative_tokens
        num_drafts = self._options.draft_length.choose(num_rows) if self._executor.can_draft else 0
        if not 0 <= num_drafts <= most:
            raise EngineError(f"a draft length of {num_drafts} was chosen; memory is reserved for {most}")
        return num_drafts

    def _require_agreement(self, rows: Sequence[Row], followed: RoundInput | None) -> None:
        """`followed`: what the executor started a round of these rows from, by itself."""
        if followed is None:
            return
        steering = (followed.num_pairs, followed.position, followed.commit)
        numbers = np.column_stack((*steering, followed.pairs)).tolist()
        for row, (count, position, commit, *pairs) in zip(rows, numbers, strict=True):
            its, own = (tuple(pairs[:count]), position, commit), (row.pairs, row.position, row.commit)
            if self._rows.holds(row) and own != its:
                raise EngineError(f"row {row.row_id}: the executor went on from {its}, the tokens are {own}")

    def _settle(self, row: Row, accepted: Accepted | RowError) -> FinishReason | None:
        """Note what the next round has to fold and to show the draft head; a finished row is gone.

        EOS wins over the length when both come at once.
        """
        reason = None
        if isinstance(accepted, RowError):
            reason = FinishReason.ERROR
        else:
            num_new = len(accepted.token_ids)
            row.pairs = accepted.token_ids
            row.position += num_new
            row.commit = num_new
            row.num_output += num_new
            if accepted.token_ids[-1] in row.request.eos_token_ids:
                reason = FinishReason.STOP
            elif not row.num_left:
                reason = FinishReason.LENGTH
        if reason is not None:
            self._rows.remove(row.row_id)
        return reason

    # --- reports ---

    def _report(
        self,
        updates: list[RowUpdate],
        num_rows: int,
        phase_s: Mapping[Phase, float],
        *,
        num_speculative_tokens: int = 0,
        num_prefill_tokens: int = 0,
    ) -> StepReport:
        return StepReport(
            updates=tuple(updates),
            num_rows=num_rows,
            phase_s=phase_s,
            num_speculative_tokens=num_speculative_tokens,
            num_prefill_tokens=num_prefill_tokens,
            kv_tokens_used=self._rows.num_kv_tokens,
            memory_bytes=self._executor.memory_bytes,
        )


def _next_chunk(row: Row, most: int) -> PrefillChunk:
    prompt = row.request.prompt_token_ids
    end = min(row.num_prefilled + most, len(prompt))
    ids = np.array(prompt[row.num_prefilled : end], np.int32)
    return PrefillChunk(ids, row.num_prefilled, prompt[end] if end < len(prompt) else None)


def _round_input(rows: Sequence[Row]) -> RoundInput:
    """One array is made of Python numbers, the parts are its columns: pairs behind num_pairs, position and commit."""
    width = max(len(row.pairs) for row in rows)
    padding = (0,) * width
    block = np.array(
        [(len(row.pairs), row.position, row.commit, *row.pairs, *padding[len(row.pairs) :]) for row in rows], np.int32
    )
    return RoundInput(pairs=block[:, 3:], num_pairs=block[:, 0], position=block[:, 1], commit=block[:, 2])


def _update(
    row: Row,
    accepted: Accepted | RowError,
    reason: FinishReason | None,
    *,
    num_drafted: int = 0,
    is_verify: bool = True,
) -> RowUpdate:
    if isinstance(accepted, RowError):
        return RowUpdate(
            row.row_id, finish_reason=reason, num_drafted=num_drafted, is_verify=is_verify, error=str(accepted)
        )
    sampler, tokens = row.sampler, accepted.token_ids
    return RowUpdate(
        row_id=row.row_id,
        token_ids=tokens,
        logprobs=sampler.logprobs(tokens, accepted.scores) if sampler.wants_logprobs else (),
        finish_reason=reason,
        num_drafted=num_drafted,
        num_accepted=accepted.num_accepted if is_verify else 0,
        is_verify=is_verify,
    )


def _observation(
    accepted: Sequence[Accepted | RowError], num_drafts: int, output: RoundOutput, sample_s: float
) -> StepObservation:
    return StepObservation(
        num_rows=len(accepted),
        num_speculative_tokens=num_drafts,
        num_drafted=(num_drafts,) * len(accepted),
        num_accepted=tuple([0 if isinstance(a, RowError) else a.num_accepted for a in accepted]),
        step_s=output.draft_s + output.verify_s + sample_s,
    )
