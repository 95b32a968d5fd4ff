"""One line of progress on stderr, redrawn on a terminal, printed now and then elsewhere; remarks stand between."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import IO, Final

_REDRAW_S: Final = 0.2
_PRINT_S: Final = 15.0


@dataclass(slots=True)
class Progress:
    """`total` is None when the input's length is unknown (stdin). `done` and `failures` (by the error's code) count
    what an earlier run answered too, which were `resumed` lines. Times are monotonic seconds.
    """

    total: int | None
    started_at: float
    stream: IO[str] = sys.stderr
    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    _shown_at: float = float("-inf")

    def answered(self, now: float) -> None:
        self.done += 1
        if now - self._shown_at >= (_REDRAW_S if self.stream.isatty() else _PRINT_S):
            self.show(now)

    def failed(self, number: int, code: str, message: str) -> None:
        """The first failure of each kind is told at once: a wrong model's name fails every line."""
        self.failures[code] += 1
        if self.failures[code] == 1:
            self.remark(f"line {number} failed: {code}: {message if message.isprintable() else ascii(message)}")

    def remark(self, text: str) -> None:
        self.stream.write(f"{self._clear()}batch: {text}\n")
        self.stream.flush()

    def show(self, now: float) -> None:
        self._shown_at = now
        self.stream.write(f"{self._clear()}{self.line(now)}{'' if self.stream.isatty() else chr(10)}")
        self.stream.flush()

    def end(self) -> None:
        """After the last `show`: what failed, and a line's end on a terminal."""
        self.stream.write("\n" if self.stream.isatty() else "")
        if self.failures:
            kinds = ", ".join(f"{count} {code}" for code, count in self.failures.most_common())
            self.remark(f"{self.failures.total()} of {self.done} lines failed: {kinds}")

    def line(self, now: float) -> str:
        rate = (self.done - self.resumed) / max(now - self.started_at, 1e-9)
        of_total = "" if self.total is None else f"/{self.total} ({100 * self.done // max(1, self.total)}%)"
        left = "" if self.total is None or not rate else f", {_clock((self.total - self.done) / rate)} left"
        return f"{self.done}{of_total} lines, {rate:.1f}/s{left}, {self.failures.total()} failed"

    def _clear(self) -> str:
        return "\r\x1b[K" if self.stream.isatty() else ""


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
