"""A job while the engine works on it: its text, its counts, its deltas, and the reply they become."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from edgellm_producer.wire import (
    BatchInfo,
    Delta,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Status,
    TokenLogprob,
    TopLogprob,
)
from edgellm_worker.engine.api import EngineTraits, RowUpdate, TokenLogprobs
from edgellm_worker.engine.api import FinishReason as RowFinish
from edgellm_worker.jobs import PreparedJob, ServedModel, deadline_at
from edgellm_worker.outcome import Outcome, Speculative, Timings, Usage
from edgellm_worker.tokenizer import TextDelta

MERGE_DELTAS_S: Final = 0.020


class Place(NamedTuple):
    """Where and when a job was put: times are the worker's monotonic seconds, `attempt` counts from 1."""

    row_id: int
    batch: BatchInfo
    attempt: int
    added_at: float
    traits: EngineTraits


class DraftCounts:
    """What drafting did for one row."""

    __slots__ = ("_histogram", "_num_accepted", "_num_drafted", "_num_steps", "_off")

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._histogram: list[int] = []
        self._off: str | None = None

    def add(self, update: RowUpdate) -> None:
        self._off = update.drafting_off or self._off
        if update.num_drafted == 0:
            return
        self._num_steps += 1
        self._num_drafted += update.num_drafted
        self._num_accepted += update.num_accepted
        missing = update.num_accepted + 1 - len(self._histogram)
        self._histogram.extend([0] * missing)
        self._histogram[update.num_accepted] += 1

    def report(self, traits: EngineTraits, temperature: float) -> Speculative:
        method = traits.speculative_method
        if self._num_steps == 0 and method == "mtp":
            method = self._why_off(traits, temperature)
        return Speculative(
            method,
            1 + self._num_accepted / self._num_steps if self._num_steps else 1.0,
            self._num_accepted / self._num_drafted if self._num_drafted else 0.0,
            self._histogram,
            self._num_steps,
            self._num_drafted,
            self._num_accepted,
        )

    def _why_off(self, traits: EngineTraits, temperature: float) -> str:
        if self._off is not None:
            return f"off: {self._off}"
        if temperature > 0 and not traits.drafts_when_sampled:
            return "off: this engine does not draft sampled rows"
        return "off: no step drafted"


class RunningJob:
    """Feed it every update of its row; it says when it is over, and what to publish.

    `updates` and `end` take the time as an argument; nothing here reads a clock.
    """

    def __init__(self, prepared: PreparedJob, place: Place, model: ServedModel) -> None:
        self.prepared = prepared
        self.id = prepared.id
        self.place = place
        self.deadline_at = deadline_at(prepared.delivery)
        self._model = model
        self._text = model.tokenizer.output_text(
            tuple(prepared.delivery.job.stop or ()), prepared.request.eos_token_ids
        )
        self._drafts = DraftCounts()
        self._unreleased: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._first_token_at: float | None = None
        self._sent_tokens = 0
        self._sent_parts = 0
        self._sending: Delta | None = None
        self._sent_at = float("-inf")

    def update(self, update: RowUpdate, now: float) -> FinishReason | None:
        """Take one step's tokens. Returns how the job ended, `ERROR` for a row that failed alone, or None."""
        self._drafts.add(update)
        if update.token_ids and self._first_token_at is None:
            self._first_token_at = now
        logprobs = update.logprobs or (None,) * len(update.token_ids)
        self._unreleased.extend(zip(update.token_ids, logprobs, strict=True))
        delta = self._text.push(update.token_ids)
        self._release(delta)
        if delta.stopped:
            return FinishReason.STOP
        return None if update.finish_reason is None else _FINISH[update.finish_reason]

    def next_delta(self, now: float, *, last: bool = False) -> Delta | None:
        """What to stream now: the delta whose sending is not yet confirmed, or what came since. None when nothing is
        due: deltas within 20 ms are merged, unless `last`.
        """
        if not self.prepared.delivery.job.stream:
            return None
        if self._sending is None and (last or now >= self._sent_at + MERGE_DELTAS_S):
            self._sending = self._cut_delta()
        return self._sending

    def delta_due_at(self) -> float | None:
        """When `next_delta` will have something without a further step, or None."""
        if not self.prepared.delivery.job.stream:
            return None
        if self._sending is None and self._sent_tokens == len(self._token_ids) and self._sent_parts == len(self._parts):
            return None
        return self._sent_at + MERGE_DELTAS_S

    def delta_sent(self, now: float) -> None:
        self._sending = None
        self._sent_at = now

    def end(self, status: Status, finish_reason: FinishReason | None, now: float, error: ErrorInfo | None) -> Outcome:
        """The one answer. Text and tokens that are known stay in it, whatever the status."""
        self._release(self._text.finish())
        request = self.prepared.request
        num_prompt_tokens, num_tokens = len(request.prompt_token_ids), len(self._token_ids)
        return Outcome(
            self.id,
            status,
            "".join(self._parts),
            self._token_ids,
            self._logprobs if self.prepared.delivery.job.logprobs else None,
            request.sampling.seed,
            finish_reason,
            error,
            Usage(num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens),
            self._timings(now),
            self._drafts.report(self.place.traits, request.sampling.temperature),
            self.place.batch,
            self.place.attempt,
        )

    def _release(self, delta: TextDelta) -> None:
        for _ in range(delta.num_tokens):
            token_id, logprobs = self._unreleased.popleft()
            self._token_ids.append(token_id)
            if logprobs is not None:
                self._logprobs.append(self._wire_logprob(token_id, logprobs))
        if delta.text:
            self._parts.append(delta.text)

    def _wire_logprob(self, token_id: int, given: TokenLogprobs) -> TokenLogprob:
        name = self._model.tokenizer.token_text
        top = [TopLogprob(token_id=other, token=name(other), logprob=value) for other, value in given.top]
        return TokenLogprob(token_id=token_id, token=name(token_id), logprob=given.logprob, top_logprobs=top)

    def _cut_delta(self) -> Delta | None:
        text = "".join(self._parts[self._sent_parts :])
        token_ids = self._token_ids[self._sent_tokens :]
        if not text and not token_ids:
            return None
        delta = Delta(
            attempt=self.place.attempt,
            offset_tokens=self._sent_tokens,
            text=text,
            token_ids=token_ids,
            logprobs=self._logprobs[self._sent_tokens :] if self.prepared.delivery.job.logprobs else None,
        )
        self._sent_parts = len(self._parts)
        self._sent_tokens = len(self._token_ids)
        return delta

    def _timings(self, now: float) -> Timings:
        delivery = self.prepared.delivery
        queue_ms = float(max(0, delivery.taken_at_ms - delivery.enqueued_at_ms))
        added_at = self.place.added_at
        first_at = self._first_token_at if self._first_token_at is not None else now
        return Timings(
            queue_ms,
            (added_at - delivery.taken_at) * 1e3,
            (first_at - added_at) * 1e3,
            queue_ms + (first_at - delivery.taken_at) * 1e3,
            (now - first_at) * 1e3,
            queue_ms + (now - delivery.taken_at) * 1e3,
        )


_FINISH: Final = {
    RowFinish.STOP: FinishReason.STOP,
    RowFinish.LENGTH: FinishReason.LENGTH,
    RowFinish.ERROR: FinishReason.ERROR,
}

CANCELLED: Final = ErrorInfo(code=ErrorCode.CANCELLED, message="cancelled on request")
EXPIRED: Final = ErrorInfo(code=ErrorCode.TIMEOUT, message="its timeout passed while it ran")
