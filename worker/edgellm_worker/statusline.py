"""What `serve` shows a person: one line at the bottom of a terminal, redrawn every second. Elsewhere: nothing.

Log lines scroll past above it: they are written to `sys.stderr` as it is at that moment, which rich replaces meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from edgellm_worker.health import HealthSnapshot, state_of
from edgellm_worker.metrics import Metrics

REFRESH_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters at one moment; `at` is monotonic seconds."""

    at: float
    tokens: float
    drafted: float
    accepted: float

    @classmethod
    def of(cls, metrics: Metrics, now: float) -> Counts:
        return cls(
            now,
            metrics.value("generation_tokens_total"),
            metrics.value("spec_decode_num_draft_tokens_total"),
            metrics.value("spec_decode_num_accepted_tokens_total"),
        )


def status_text(snapshot: HealthSnapshot, metrics: Metrics | None, before: Counts, after: Counts) -> str:
    """Rates are over the time between the two counts; before the engine is there, only the state and its age."""
    state = state_of(snapshot).value
    if metrics is None:
        return f"{state}  {after.at - before.at:.0f} s"
    rate = (after.tokens - before.tokens) / max(after.at - before.at, 1e-9)
    drafted = after.drafted - before.drafted
    acceptance = f"{(after.accepted - before.accepted) / drafted:.0%}" if drafted else "-"
    busy, slots, waiting = (metrics.value(name) for name in ("slots_busy", "slots_total", "queue_lag"))
    return (
        f"{state}  {busy:.0f}/{slots:.0f} slots  {waiting:.0f} waiting  {rate:.1f} tok/s  drafts accepted {acceptance}"
    )


@dataclass(slots=True)
class StatusLine:
    """`metrics` is None until the engine is loaded."""

    snapshot: Callable[[], HealthSnapshot]
    clock: Callable[[], float]
    metrics: Metrics | None = None

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Drawn while the block runs, and only where somebody can see it."""
        if not sys.stderr.isatty():
            yield
            return
        live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        live.start()
        task = asyncio.create_task(self._redraw(live), name="status line")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with contextlib.suppress(OSError):  # the terminal may be closed by now
                live.stop()

    async def _redraw(self, live: Live) -> None:
        before = Counts(self.clock(), 0.0, 0.0, 0.0)
        while True:
            metrics, now = self.metrics, self.clock()
            after = Counts(now, 0.0, 0.0, 0.0) if metrics is None else Counts.of(metrics, now)
            live.update(Text(status_text(self.snapshot(), metrics, before, after)), refresh=True)
            if metrics is not None:
                before = after
            await asyncio.sleep(REFRESH_S)
