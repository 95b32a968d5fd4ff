"""The rows that an engine holds, and the step reports made of them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from edgellm_worker.engine.api import Phase, RowUpdate, StepReport
from edgellm_worker.engine.edgellm.rows import Row


class RowBook:
    """`report` takes at most one update per row and forgets rows that are gone.

    Time since the last report goes to PREFILL while the first row has not spoken yet, to VERIFY after: the runtime
    does not tell its phases apart from outside, so VERIFY holds drafting, verification and sampling together.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._last_report_s = time.monotonic()
        self._unread_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, row: Row) -> None:
        self._rows[row.row_id] = row

    def drop(self, row_id: int) -> Row | None:
        row = self._rows.pop(row_id, None)
        if row is not None:
            row.drop()
        return row

    def prompts_submitted(self, rows: Iterable[Row]) -> None:
        if not self._unread_prompt_tokens:
            self._last_report_s = time.monotonic()
        self._unread_prompt_tokens += sum(len(row.request.prompt_token_ids) for row in rows)

    def report(self, num_drafts: int) -> StepReport:
        now = time.monotonic()
        elapsed_s, self._last_report_s = now - self._last_report_s, now
        num_rows = len(self._rows)
        updates = tuple(self._take_updates())
        phase, num_prefill_tokens = Phase.VERIFY, 0
        if self._unread_prompt_tokens:
            phase = Phase.PREFILL
            if any(update.token_ids for update in updates):
                num_prefill_tokens, self._unread_prompt_tokens = self._unread_prompt_tokens, 0
        return StepReport(
            updates=updates,
            num_rows=num_rows,
            phase_s={phase: elapsed_s},
            num_speculative_tokens=num_drafts,
            num_prefill_tokens=num_prefill_tokens,
            kv_tokens_used=sum(len(row.request.prompt_token_ids) + row.num_tokens for row in self._rows.values()),
        )

    def _take_updates(self) -> Iterable[RowUpdate]:
        for row_id, row in tuple(self._rows.items()):
            update = row.next_update()
            if update is not None:
                yield update
            if row.is_gone:
                del self._rows[row_id]
