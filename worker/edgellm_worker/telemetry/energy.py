"""Joules from watts: the trapezoid between readings."""

from __future__ import annotations

from typing import Final

MAX_GAP_S: Final = 60.0
"""Over a longer silence (suspend, a lost sensor) the power is not known, so nothing is added."""


class EnergyMeter:
    """Owns the running total. `total_j` is None until power was read once."""

    def __init__(self) -> None:
        self.total_j: float | None = None
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, watts: float | None) -> None:
        """`now_s` is monotonic seconds; None means that power could not be read this time."""
        if watts is None:
            return
        if self.total_j is None:
            self.total_j = 0.0
        if self._last is not None and 0 < now_s - self._last[0] <= MAX_GAP_S:
            self.total_j += max((watts + self._last[1]) / 2, 0.0) * (now_s - self._last[0])
        self._last = (now_s, watts)
