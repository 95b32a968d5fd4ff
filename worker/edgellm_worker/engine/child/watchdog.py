"""When is an engine hung?

An engine call cannot be interrupted, and a GPU that spins shows a busy process. What tells a hung engine from a slow
one is *progress*: tokens committed or prompt tokens read. The allowance between two signs of progress grows with the
prompt tokens still to be read, since one prefill chunk may be one long call, and the clock runs only while rows are
there.
Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    """`load_s` covers loading, building and warm-up; `progress_s` is the allowance of one step."""

    load_s: float = 1800.0
    progress_s: float = 30.0
    prefill_s_per_1000_tokens: float = 10.0


class Watchdog:
    def __init__(self, limits: WatchdogLimits) -> None:
        self._limits = limits
        self._last_progress: float | None = None
        self._num_prompt_tokens = 0

    def row_added(self, now: float, num_prompt_tokens: int) -> None:
        if self._last_progress is None:
            self._last_progress = now
        self._num_prompt_tokens += num_prompt_tokens

    def step_done(self, now: float, *, num_rows: int, num_prefill_tokens: int, num_tokens: int) -> None:
        """After a report: `num_rows` counts the rows that are still there."""
        self._num_prompt_tokens = max(0, self._num_prompt_tokens - num_prefill_tokens)
        if num_rows == 0:
            self.disarm()
        elif num_prefill_tokens or num_tokens:
            self._last_progress = now

    def disarm(self) -> None:
        self._last_progress = None
        self._num_prompt_tokens = 0

    @property
    def deadline(self) -> float | None:
        """The moment from which the engine counts as hung, or None while no row is there."""
        if self._last_progress is None:
            return None
        prefill_s = self._limits.prefill_s_per_1000_tokens * self._num_prompt_tokens / 1000
        return self._last_progress + self._limits.progress_s + prefill_s
