"""The draft settings, as `--speculative-config` spells them: vLLM's keys, and `adaptive`.

    {"method": "mtp", "num_speculative_tokens": 5}
    {"method": "mtp", "num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 64, 2]]}
    {"method": "mtp", "num_speculative_tokens": 5, "adaptive": true}

`num_speculative_tokens` is the most drafts of any step; memory is reserved for it. In the schedule each entry is
[first rows, last rows, drafts]: the first range starts at 1, ranges do not overlap, a gap continues the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from edgellm_worker.engine.runtime.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    FixedDraftLength,
    ScheduledDraftLength,
)

MAX_SPECULATIVE_TOKENS: Final = 15
_METHODS: Final = ("mtp",)
_SCHEDULE: Final = "num_speculative_tokens_per_batch_size"
_KEYS: Final = ("method", "num_speculative_tokens", _SCHEDULE, "adaptive")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """`schedule` is empty without one; it and `adaptive` exclude each other."""

    num_speculative_tokens: int
    method: str = "mtp"
    schedule: tuple[tuple[int, int, int], ...] = ()
    adaptive: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Raises `ValueError` whose text names every problem, "; " between them."""
        problems = [f"unknown key {key!r} (known: {', '.join(_KEYS)})" for key in given if key not in _KEYS]
        method, adaptive = given.get("method", "mtp"), given.get("adaptive", False)
        length: Any = given.get("num_speculative_tokens")
        schedule = given.get(_SCHEDULE)
        if method not in _METHODS:
            problems.append(f"method is {method!r}; this engine drafts by {', '.join(_METHODS)}")
        if not _is_int(length) or not 0 <= length <= MAX_SPECULATIVE_TOKENS:
            problems.append(f"num_speculative_tokens is {length!r}, not an integer from 0 to {MAX_SPECULATIVE_TOKENS}")
        if not isinstance(adaptive, bool):
            problems.append(f"adaptive is {adaptive!r}, not true or false")
        if schedule is not None:
            problems += _schedule_problems(schedule)
            if adaptive is True:
                problems.append(f"adaptive and {_SCHEDULE} exclude each other")
        if problems:
            raise ValueError("; ".join(problems))
        return cls(length, method, tuple(sorted(tuple(entry) for entry in schedule or ())), adaptive)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Every length that a step may have, ascending. No drafts at all are always possible."""
        most = self.num_speculative_tokens
        if self.adaptive:
            return tuple(range(most + 1))
        return tuple(
            sorted({0, *(min(length, most) for _, _, length in self.schedule), *((most,) * (not self.schedule))})
        )

    def draft_length(self) -> DraftLength:
        """A new controller."""
        if self.adaptive:
            return AdaptiveDraftLength(self.num_speculative_tokens)
        if self.schedule:
            return ScheduledDraftLength(self.schedule, self.num_speculative_tokens)
        return FixedDraftLength(self.num_speculative_tokens)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _schedule_problems(schedule: Any) -> list[str]:
    if not isinstance(schedule, list | tuple) or not schedule:
        return [f"{_SCHEDULE} is not a list of [first, last, drafts]"]
    wrong = [
        entry
        for entry in schedule
        if not isinstance(entry, list | tuple) or len(entry) != 3 or not all(_is_int(n) for n in entry)
    ]
    if wrong:
        return [f"{_SCHEDULE}: {entry!r} is not three integers [first, last, drafts]" for entry in wrong]
    problems = [
        f"{_SCHEDULE}: {list(entry)} needs 1 <= first <= last and drafts >= 0"
        for entry in schedule
        if not 1 <= entry[0] <= entry[1] or entry[2] < 0
    ]
    ranges = sorted((first, last) for first, last, _ in schedule)
    if ranges[0][0] != 1:
        problems.append(f"{_SCHEDULE}: the first range starts at {ranges[0][0]}, not at 1")
    for (_, last), (first, _) in pairwise(ranges):
        if first <= last:
            problems.append(f"{_SCHEDULE}: two ranges both hold {first} rows")
    return problems
