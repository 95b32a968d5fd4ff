"""Closed batches: the engine that drafts.

    add ──▶ waiting ──group of one key──▶ NativeCall ──▶ settle ──▶ next group
                 ▲                            │
                 └── row by row, after a call that one row made fail

A batch is closed when its call starts. Rows of one admission may reach `add` one after the other while `step` is being
called already, so the first step after an idle time only gathers. Rows that come later, or have another key, wait for
the next call; `max_batch_size` bounds running and waiting rows together.

A row whose tokens are complete is reported at once, while the call runs on for the others: its seat stays empty until
the batch ends. That is this runtime's limit, not a choice made here (`EngineTraits.in_flight` is False).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, StepReport
from edgellm_worker.engine.edgellm.call import (
    DraftingCounters,
    NativeCall,
    RowsAtFaultError,
    native_request,
    read_counters,
)
from edgellm_worker.engine.edgellm.fields import BatchFields
from edgellm_worker.engine.edgellm.native import NativeRuntime
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.edgellm.row_engine import RowEngine, reads_otherwise
from edgellm_worker.engine.edgellm.rows import Row
from edgellm_worker.engine.edgellm.rules import EdgeLlmRules

_LOG = logging.getLogger(__name__)

GATHER_S: Final = 0.005
POLL_MS: Final = 50
CLOSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class LoadedRuntime:
    """The vendor's module and its loaded runtime. `num_drafts` is 0 for a bundle without a draft."""

    module: Any
    runtime: NativeRuntime
    num_drafts: int
    has_counters: bool


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One finished call: its rows, the runtime's own counters of it (zeros when it was not drafted), and the accepted
    drafts as read from the rows' chunks, which should agree with the runtime's where no chunk was held back.
    """

    num_rows: int
    counters: DraftingCounters
    num_accepted_told: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    row: Row
    text: str
    fields: BatchFields
    key: Hashable


class StaticEngine(RowEngine):
    def __init__(self, loaded: LoadedRuntime, limits: EngineLimits, traits: EngineTraits, prompts: PromptText) -> None:
        super().__init__(EdgeLlmRules(limits, prompts=prompts), traits, prompts, loaded.num_drafts)
        self._loaded = loaded
        self._waiting: list[_Waiting] = []
        self._call: NativeCall | None = None
        self._group: list[_Waiting] = []
        self._gather_until_s: float | None = None
        self._counters = DraftingCounters()
        self.last_call: CallSummary | None = None

    def add(self, row_id: int, request: GenerationRequest) -> None:
        admitted = self._admit(row_id, request)
        if self.num_rows == 1:
            self._gather_until_s = time.monotonic() + GATHER_S
        self._waiting.append(_Waiting(admitted.row, admitted.text, admitted.fields, self.compat_key(request)))

    def remove(self, row_id: int) -> None:
        row = self._book.drop(row_id)
        self._waiting = [w for w in self._waiting if w.row is not row]

    def step(self) -> StepReport:
        if self._call is None:
            self._start_next()
        if self._call is not None:
            self._call.poll(POLL_MS)
            if self._call.has_ended:
                self._end_call(self._call)
        return self._book.report(self._num_drafts if self._is_drafted else 0)

    def close(self) -> None:
        """Cancel what runs. A runtime that does not come back within `CLOSE_S` is left to the end of its process."""
        call, self._call = self._call, None
        self._waiting.clear()
        if call is not None and not call.abandon(CLOSE_S):
            _LOG.warning("the native call did not end within %s s of its cancellation", CLOSE_S)

    @property
    def _is_drafted(self) -> bool:
        return bool(self._group) and not self._group[0].fields.disable_spec_decode

    def _start_next(self) -> None:
        self._group = []
        if not self._waiting:
            return
        if self._gather_until_s is not None and len(self._waiting) < self.limits.max_batch_size:
            rest_s = self._gather_until_s - time.monotonic()
            if rest_s > 0:
                time.sleep(rest_s)
                return
        self._gather_until_s = None
        key = self._waiting[0].key
        group = [w for w in self._waiting if w.key == key]
        self._waiting = [w for w in self._waiting if w.key != key]
        self._group = [w for w in group if self._runtime_agrees(w)]
        if self._group:
            self._call = NativeCall(self._loaded.runtime, self._request(self._group), [w.row for w in self._group])
            self._book.prompts_submitted(w.row for w in self._group)

    def _request(self, group: list[_Waiting]) -> Any:
        longest = max(w.row.request.max_new_tokens for w in group)
        return native_request(
            self._loaded.module, group[0].fields, [w.row for w in group], [w.text for w in group], longest
        )

    def _runtime_agrees(self, waiting: _Waiting) -> bool:
        try:
            counted = self._loaded.runtime.count_prompt_tokens(self._request([waiting]))
        except RuntimeError as error:
            waiting.row.fail(f"the runtime refuses this prompt: {error}")
            return False
        return not reads_otherwise(waiting.row, counted)

    def _end_call(self, call: NativeCall) -> None:
        self._call = None
        try:
            call.settle()
        except RowsAtFaultError as error:
            self._isolate(str(error))
            return
        counters = DraftingCounters()
        if self._is_drafted and self._loaded.has_counters:
            total = read_counters(self._loaded.runtime)
            counters, self._counters = total.since(self._counters), total
        self.last_call = CallSummary(len(call.rows), counters, sum(row.num_accepted for row in call.rows))
        _LOG.info("native call done: %s", self.last_call)

    def _isolate(self, message: str) -> None:
        """The call failed for all rows because of one: rows that got nothing yet run again, each alone."""
        alive = [w for w in self._group if not w.row.is_done]
        if len(self._group) == 1 or any(w.row.num_tokens for w in alive):
            for waiting in alive:
                waiting.row.fail(message)
            return
        _LOG.warning("one of %d rows failed the native call, running each alone: %s", len(alive), message)
        again = [_Waiting(w.row, w.text, w.fields, ("alone", w.row.row_id)) for w in alive]
        self._waiting = again + self._waiting
