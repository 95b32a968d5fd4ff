"""The rows of an engine and where they are.

    slots   | running 0 .. B-1 | free | prefilling |

Running rows fill the slots from 0 so that a round covers exactly them; a row that is still reading its prompt sits in
the highest free slot. A row that starts running, and the last running row when another leaves, changes its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm_worker.engine.api import GenerationRequest
from edgellm_worker.engine.errors import CapacityError, RowError
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import Scores


@dataclass(slots=True, eq=False)
class Row:
    """One sequence. The loop is its only writer.

    num_prefilled  prompt tokens that the model has read
    num_output     committed output tokens
    position       of the last committed token, once running; the prompt's last as it starts
    pairs, commit  as in runtime/executor.py
    """

    row_id: int
    request: GenerationRequest
    sampler: RowSampler
    slot: int
    num_prefilled: int = 0
    num_output: int = 0
    position: int = 0
    pairs: tuple[int, ...] = field(default=())
    commit: int = 0

    @property
    def num_left(self) -> int:
        """How many tokens it may still emit."""
        return self.request.max_new_tokens - self.num_output

    def draft(self, scores: Scores, position: int) -> int:
        """The row's own draft. Where the head's scores are not numbers any will do: verification decides."""
        try:
            return self.sampler.draft(scores, position)
        except RowError:
            return 0

    def surely_outlives(self, num_tokens: int) -> bool:
        """Whether so many more tokens leave it running, bar an EOS."""
        return self.num_left > num_tokens

    @property
    def num_kv_tokens(self) -> int:
        return max(self.num_prefilled, self.position + 1)


class RowTable:
    """`swap(a, b)` exchanges the device state of two slots."""

    def __init__(self, num_slots: int, swap: Callable[[int, int], None]) -> None:
        self._slots: list[Row | None] = [None] * num_slots
        self._swap = swap
        self._rows: dict[int, Row] = {}
        self.running: list[Row] = []
        self.prefilling: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._rows

    def holds(self, row: Row) -> bool:
        """Whether the row was not removed."""
        return self._rows.get(row.row_id) is row

    @property
    def num_kv_tokens(self) -> int:
        return sum(row.num_kv_tokens for row in self._rows.values())

    def add(self, row_id: int, request: GenerationRequest, sampler: RowSampler) -> Row:
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        if not free:
            raise CapacityError(f"all {len(self._slots)} slots are taken")
        row = self._rows[row_id] = Row(row_id, request, sampler, free[-1])
        self._slots[row.slot] = row
        self.prefilling.append(row)
        return row

    def start(self, row: Row) -> None:
        """The prompt is read: from now on the row takes part in rounds."""
        row.position = len(row.request.prompt_token_ids) - 1
        self.prefilling.remove(row)
        self._move(row, len(self.running))
        self.running.append(row)

    def remove(self, row_id: int) -> Row | None:
        """Free the row's slot; None when there is no such row."""
        row = self._rows.pop(row_id, None)
        if row is None:
            return None
        if row in self.prefilling:
            self.prefilling.remove(row)
        else:
            last = self.running.pop()
            if last is not row:
                self.running[row.slot] = last
                self._move(last, row.slot)
        self._slots[row.slot] = None
        return row

    def _move(self, row: Row, slot: int) -> None:
        if row.slot == slot:
            return
        self._swap(row.slot, slot)
        other = self._slots[slot]
        self._slots[row.slot], self._slots[slot] = other, row
        if other is not None:
            other.slot = row.slot
        row.slot = slot
