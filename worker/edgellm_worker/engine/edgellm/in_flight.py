"""In-flight batches: rows join and leave at any round, driven by the runtime's own `RequestEngine`.

The vendor's 0.11.0 drives bundles without a draft this way only; a release that takes draft settings here is used with
them (`Capabilities.in_flight_drafting`). One native request per row; the runtime's scheduler seats those whose
batch-wide fields equal the running ones' and lets the others wait until the batch is empty. `submit` refuses when its
own queue is full, which `max_batch_size` rows cannot fill: a refusal fails the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, StepReport
from edgellm_worker.engine.edgellm.call import native_request
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.edgellm.row_engine import RowEngine, reads_otherwise
from edgellm_worker.engine.edgellm.rows import Row
from edgellm_worker.engine.edgellm.rules import EdgeLlmRules, length_class
from edgellm_worker.engine.errors import EngineError

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


class InFlightEngine(RowEngine):
    def __init__(
        self, loaded: LoadedRequestEngine, limits: EngineLimits, traits: EngineTraits, prompts: PromptText
    ) -> None:
        super().__init__(EdgeLlmRules(limits, in_flight=True, prompts=prompts), traits, prompts, loaded.num_drafts)
        self._loaded = loaded
        self._seats: dict[int, _Seat] = {}

    def add(self, row_id: int, request: GenerationRequest) -> None:
        admitted = self._admit(row_id, request)
        row, length = admitted.row, length_class(request.max_new_tokens)
        native = native_request(self._loaded.module, admitted.fields, [row], [admitted.text], length)
        try:
            if reads_otherwise(row, self._loaded.native.count_prompt_tokens(native)):
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
        return self._book.report(self._num_drafts)

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
