"""One line of progress on stderr: redrawn on a terminal, printed now and then elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import IO, Final

_REDRAW_S: Final = 0.2
_PRINT_S: Final = 15.0


@dataclass(slots=True)
class Progress:
    """`total` is None when the input's length is unknown (stdin). Times are monotonic seconds."""

    total: int | None
    started_at: float
    stream: IO[str] = sys.stderr
    done: int = 0
    failed: int = 0
    _shown_at: float = float("-inf")

    def answered(self, now: float, *, failed: bool) -> None:
        self.done += 1
        self.failed += failed
        if now - self._shown_at >= (_REDRAW_S if self.stream.isatty() else _PRINT_S):
            self.show(now)

    def show(self, now: float) -> None:
        self._shown_at = now
        before, after = ("\r\x1b[K", "") if self.stream.isatty() else ("", "\n")
        self.stream.write(f"{before}{self.line(now)}{after}")
        self.stream.flush()

    def line(self, now: float) -> str:
        rate = self.done / max(now - self.started_at, 1e-9)
        of_total = "" if self.total is None else f"/{self.total} ({100 * self.done // max(1, self.total)}%)"
        left = "" if self.total is None or not self.done else f", {_clock((self.total - self.done) / rate)} left"
        return f"{self.done}{of_total} lines, {rate:.1f}/s{left}, {self.failed} failed"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
