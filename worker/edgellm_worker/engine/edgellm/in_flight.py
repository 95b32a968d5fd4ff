"""In-flight batches: rows join and leave at any round, driven by the runtime's own `RequestEngine`.

The vendor's 0.11.0 drives bundles without a draft this way only; a release that takes draft settings here is used with
them (`Capabilities.in_flight_drafting`). One native request per row; the runtime's scheduler seats those whose
batch-wide fields equal the running ones' and lets the others wait until the batch is empty. `submit` refuses when its
own queue is full, which `max_batch_size` rows cannot fill: a refusal fails the row.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, StepReport
from edgellm_worker.engine.edgellm.book import RowBook
from edgellm_worker.engine.edgellm.call import native_request
from edgellm_worker.engine.edgellm.fields import batch_fields
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.edgellm.rows import Row
from edgellm_worker.engine.edgellm.rules import EdgeLlmRules, drafting_off, length_class
from edgellm_worker.engine.errors import CapacityError, EngineError

POLL_MS: Final = 50


@dataclass(frozen=True, slots=True)
class LoadedRequestEngine:
    """The vendor's module and its running `RequestEngine`."""

    module: Any
    native: Any
    num_drafts: int


@dataclass(frozen=True, slots=True)
class _Seat:
    row: Row
    handle: Any


class InFlightEngine:
    def __init__(
        self, loaded: LoadedRequestEngine, limits: EngineLimits, traits: EngineTraits, prompts: PromptText
    ) -> None:
        self._loaded = loaded
        self._limits = limits
        self._traits = traits
        self._prompts = prompts
        self._rules = EdgeLlmRules(limits, in_flight=True, prompts=prompts)
        self._book = RowBook()
        self._seats: dict[int, _Seat] = {}

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def traits(self) -> EngineTraits:
        return self._traits

    @property
    def num_rows(self) -> int:
        return len(self._book)

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self._rules.compat_key(request)

    def validate(self, request: GenerationRequest) -> None:
        self._rules.validate(request)

    def add(self, row_id: int, request: GenerationRequest) -> None:
        self.validate(request)
        if len(self._book) >= self._limits.max_batch_size:
            raise CapacityError(f"all {self._limits.max_batch_size} slots are taken")
        text = self._prompts.of(request.prompt_token_ids)
        fields = batch_fields(request.sampling)
        is_drafted = self._loaded.num_drafts > 0 and not fields.disable_spec_decode
        why_not = drafting_off(request) if self._loaded.num_drafts else None
        row = Row(row_id, request, self._loaded.num_drafts if is_drafted else 0, why_not)
        native = native_request(self._loaded.module, fields, [row], [text], length_class(request.max_new_tokens))
        self._book.put(row)
        expected = len(request.prompt_token_ids)
        try:
            counted = list(self._loaded.native.count_prompt_tokens(native))
            if counted != [expected]:
                row.fail(f"the runtime's tokenizer reads this prompt as {counted[0]} tokens, not as {expected}")
                return
            handle = self._loaded.native.submit(native)
        except (RuntimeError, ValueError, self._loaded.module.SubmitError) as error:
            row.fail(f"the runtime refuses this request: {error}")
            return
        self._seats[row_id] = _Seat(row, handle)
        self._book.prompts_submitted([row])

    def remove(self, row_id: int) -> None:
        self._book.drop(row_id)
        seat = self._seats.pop(row_id, None)
        if seat is not None:
            seat.handle.cancel()

    def step(self) -> StepReport:
        if not self._loaded.native.running:
            raise EngineError("the runtime's request engine has stopped")
        self._pull()
        if not any(seat.row.has_updates for seat in self._seats.values()):
            waiting = next((seat.row for seat in self._seats.values() if seat.row.channel is not None), None)
            if waiting is not None:
                waiting.wait(POLL_MS)
                self._pull()
        self._settle()
        return self._book.report(self._loaded.num_drafts)

    def close(self) -> None:
        self._loaded.native.shutdown(self._loaded.module.ShutdownMode.CANCEL)

    def _pull(self) -> None:
        for seat in self._seats.values():
            seat.row.pull()

    def _settle(self) -> None:
        """Rows that have ended leave their seats; one whose channel failed is told what its handle says."""
        for row_id, seat in tuple(self._seats.items()):
            if seat.row.channel is not None:
                continue
            if seat.row.is_done:
                del self._seats[row_id]
            elif seat.handle.ready():
                del self._seats[row_id]
                _take_result(seat)


def _take_result(seat: _Seat) -> None:
    try:
        response = seat.handle.get()
    except RuntimeError as error:
        seat.row.fail(str(error))
        return
    logprobs = list(response.logprobs[0]) if response.logprobs else []
    seat.row.take_rest(list(response.output_ids[0]), logprobs, response.finish_reasons[0].name)
