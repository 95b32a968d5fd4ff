"""The engine: one loop of drafting, verifying, accepting and committing over whatever runs the model.

A step is one of two things.

    prefill   up to `prefill_chunk_tokens` prompt tokens, first come first served; a row whose prompt ends draws its
              first token and starts running
    round     every running row drafts, is verified together with the others, accepts, and commits 1 to K+1 tokens

While both have work they alternate, so a long prompt never stops rows that run. The draft length is chosen anew for
each round, and every round folds what the one before committed, so it may be anything from 0 to the most reserved.

Rows are independent: each has its own sampler, its noise depends on its seed and positions alone, and one whose scores
are not numbers fails by itself.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

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
from edgellm_worker.engine.runtime.acceptance import Accepted, Verified, accept_rows
from edgellm_worker.engine.runtime.draft_length import DraftLength, StepObservation
from edgellm_worker.engine.runtime.executor import DraftChooser, Executor, PrefillChunk, RoundInput, RoundOutput
from edgellm_worker.engine.runtime.grammar import GrammarCompiler
from edgellm_worker.engine.runtime.rows import Row, RowTable
from edgellm_worker.engine.runtime.rules import SpeculativeRules
from edgellm_worker.engine.runtime.sampling import Draw, RowSampler, Scores


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """What the loop needs beside the executor. `grammars` None: this engine has no structured output."""

    limits: EngineLimits
    traits: EngineTraits
    draft_length: DraftLength
    prefill_chunk_tokens: int = 128
    grammars: GrammarCompiler | None = None


class SpeculativeEngine:
    """`Engine` over an `Executor`, which it owns and closes."""

    def __init__(self, executor: Executor, options: SpeculativeOptions) -> None:
        self._executor = executor
        self._options = options
        self._rules = SpeculativeRules(options.limits)
        self._rows = RowTable(executor.num_slots, executor.swap)
        self._is_prefill_turn = True

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
        row = self._rows.add(row_id, request, RowSampler(request.sampling, request.prompt_token_ids, grammar))
        self._executor.clear(row.slot)

    def remove(self, row_id: int) -> None:
        self._rows.remove(row_id)

    def close(self) -> None:
        self._executor.close()

    def step(self) -> StepReport:
        rows = self._rows
        if rows.prefilling and (self._is_prefill_turn or not rows.running):
            self._is_prefill_turn = False
            return self._prefill_step()
        self._is_prefill_turn = True
        return self._round_step()

    # --- prefill ---

    def _prefill_step(self) -> StepReport:
        began = time.perf_counter()
        num_rows, left, sample_s = len(self._rows), self._options.prefill_chunk_tokens, 0.0
        updates: list[RowUpdate] = []
        for row in tuple(self._rows.prefilling):
            chunk = _next_chunk(row, left)
            scores = self._executor.prefill(row.slot, chunk)
            row.num_prefilled += len(chunk.ids)
            left -= len(chunk.ids)
            if scores is not None:
                sampling = time.perf_counter()
                updates.append(self._first_token(row, scores))
                sample_s += time.perf_counter() - sampling
            if not left:
                break
        phase_s = {Phase.PREFILL: time.perf_counter() - began - sample_s, Phase.SAMPLE: sample_s}
        num_tokens = self._options.prefill_chunk_tokens - left
        return self._report(updates, num_rows, phase_s, num_prefill_tokens=num_tokens)

    def _first_token(self, row: Row, scores: Scores) -> RowUpdate:
        num_prompt = len(row.request.prompt_token_ids)
        self._rows.start(row)
        (accepted,) = accept_rows([_verified(row, (scores,), ())])
        if isinstance(accepted, RowError):
            return self._fail(row, accepted, is_verify=False)
        row.position, row.pairs, row.commit = num_prompt, (accepted.draws[0].token_id,), 0
        row.num_output = 1
        return self._commit(row, accepted.draws, is_verify=False)

    # --- rounds ---

    def _round_step(self) -> StepReport:
        running = tuple(self._rows.running)
        if not running:
            return self._report([], 0, {})
        num_drafts = self._options.draft_length.choose(len(running)) if self._executor.can_draft else 0
        output = self._run(running, num_drafts)
        began = time.perf_counter()
        drafts = output.drafts.tolist()
        verified = [_verified(*given) for given in zip(running, output.scores, drafts, strict=True)]
        accepted = accept_rows(verified)
        updates = [self._settle(row, given, num_drafts) for row, given in zip(running, accepted, strict=True)]
        sample_s = time.perf_counter() - began
        self._options.draft_length.observe(_observation(updates, num_drafts, output, sample_s))
        phase_s = {Phase.DRAFT: output.draft_s, Phase.VERIFY: output.verify_s, Phase.SAMPLE: sample_s}
        num_rows = len(running) + len(self._rows.prefilling)
        return self._report(updates, num_rows, phase_s, num_speculative_tokens=num_drafts)

    def _run(self, running: tuple[Row, ...], num_drafts: int) -> RoundOutput:
        most = self._options.limits.num_speculative_tokens
        if not 0 <= num_drafts <= most:
            raise EngineError(f"a draft length of {num_drafts} was chosen; memory is reserved for {most}")
        width = max(len(row.pairs) for row in running)
        batch = RoundInput(
            pairs=np.array([row.pairs + (0,) * (width - len(row.pairs)) for row in running], np.int32),
            num_pairs=np.array([len(row.pairs) for row in running], np.int32),
            position=np.array([row.position for row in running], np.int32),
            commit=np.array([row.commit for row in running], np.int32),
            dense_rows=frozenset(i for i, row in enumerate(running) if row.sampler.needs_dense),
        )
        return self._executor.run_round(batch, num_drafts, [_chooser(row) for row in running])

    def _settle(self, row: Row, accepted: Accepted | RowError, num_drafted: int) -> RowUpdate:
        """Note what the next round has to fold and to show the draft head."""
        if isinstance(accepted, RowError):
            return self._fail(row, accepted, num_drafted=num_drafted)
        num_new = len(accepted.draws)
        row.pairs = tuple(draw.token_id for draw in accepted.draws)
        row.position += num_new
        row.commit = num_new
        row.num_output += num_new
        return self._commit(row, accepted.draws, num_drafted=num_drafted, num_accepted=accepted.num_accepted)

    # --- reports ---

    def _commit(
        self,
        row: Row,
        draws: tuple[Draw, ...],
        *,
        num_drafted: int = 0,
        num_accepted: int = 0,
        is_verify: bool = True,
    ) -> RowUpdate:
        """The row's update; a finished row is gone with it. EOS wins over the length when both come at once."""
        reason = None
        if draws[-1].token_id in row.request.eos_token_ids:
            reason = FinishReason.STOP
        elif not row.num_left:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._rows.remove(row.row_id)
        return RowUpdate(
            row_id=row.row_id,
            token_ids=tuple(draw.token_id for draw in draws),
            logprobs=tuple(draw.logprobs for draw in draws if draw.logprobs is not None),
            finish_reason=reason,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            is_verify=is_verify,
        )

    def _fail(self, row: Row, error: RowError, *, num_drafted: int = 0, is_verify: bool = True) -> RowUpdate:
        self._rows.remove(row.row_id)
        return RowUpdate(
            row_id=row.row_id,
            finish_reason=FinishReason.ERROR,
            num_drafted=num_drafted,
            is_verify=is_verify,
            error=str(error),
        )

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


def _chooser(row: Row) -> DraftChooser:
    """The row's own drafts. Where the head's scores are not numbers any draft will do: verification decides."""

    def choose(scores: Scores, position: int) -> int:
        try:
            return row.sampler.draft(scores, position)
        except RowError:
            return 0

    return choose


def _verified(row: Row, scores: Sequence[Scores], drafts: Sequence[int]) -> Verified:
    first = len(row.request.prompt_token_ids) + row.num_output
    return Verified(row.sampler, scores, drafts, first, row.request.eos_token_ids, row.num_left)


def _observation(
    updates: Sequence[RowUpdate], num_drafts: int, output: RoundOutput, sample_s: float
) -> StepObservation:
    return StepObservation(
        num_rows=len(updates),
        num_speculative_tokens=num_drafts,
        num_drafted=tuple(update.num_drafted for update in updates),
        num_accepted=tuple(update.num_accepted for update in updates),
        step_s=output.draft_s + output.verify_s + sample_s,
    )
