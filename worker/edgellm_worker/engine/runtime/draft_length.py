"""How many tokens to draft in the next step: fixed, by batch size, or measured.

A step with k drafts takes t(n, k) seconds for n rows and gives each row 1 + a_1 + a_1 a_2 + ... + a_1...a_k tokens on
average, a_i being the share of i-th drafts accepted among those whose predecessors all were. `AdaptiveDraftLength`
keeps running estimates of both and takes the k with the most tokens per second. Three things keep it honest:

    hysteresis   it leaves the current length only for one that promises `SWITCH_GAIN` more, and then stays for
                 `DWELL_STEPS`
    looking      what is not tried is not known: a_i beyond the current k, t at another k. Now and then one step is
                 spent on another length, the one not seen for longest, when the loss that the estimates foresee for it
                 fits a budget of `LOOK_SHARE` of the time spent so far. So a poor length is looked at rarely, a
                 near-equal one often, and a length of 0 is left again when drafts become good
    a survey     of the first load, where nothing is known of other lengths: two of its first steps are spent on others,
                 beside the budget. A further number of rows starts with the step times of the nearest known one, scaled
                 to its own
    forgetting   old observations fade (`MEMORY_ROWS`, `MEMORY_STEPS`, `FADING_STEPS`), so that a change of text or load
                 is noticed

No clock and no random numbers: the same observations give the same choices. How near this comes to the best fixed
length is tested over recorded traces (tests/unit/test_draft_length_simulation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

SWITCH_GAIN: Final = 1.02
DWELL_STEPS: Final = 4
LOOK_SHARE: Final = 0.01
LOOK_EVERY_STEPS: Final = 16
SURVEY_STEPS: Final = (2, 4)
MEMORY_ROWS: Final = 512.0
MEMORY_STEPS: Final = 64.0
FADING_STEPS: Final = 512.0
OUTLIER: Final = 1.5
_PRIOR_SHARE: Final = 0.7
_PRIOR_ROWS: Final = 2.0
_GUESSED_GROWTH: Final = 0.05
"""How much longer each draft makes a step, relative to the shortest step known, while only one length was measured."""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One verify step. `num_drafted` and `num_accepted` are per row; a row that was not drafted has 0 and 0.

    `step_s` is what drafting, verifying and sampling took, without prefill.
    """

    num_rows: int
    num_speculative_tokens: int
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]
    step_s: float


class DraftLength(Protocol):
    def choose(self, num_rows: int) -> int:
        """The drafts per row of the next step with this many rows. Does not change the controller."""

    def observe(self, observation: StepObservation) -> None:
        """Learn from a step that was run."""


class FixedDraftLength:
    def __init__(self, num_speculative_tokens: int) -> None:
        self._length = num_speculative_tokens

    def choose(self, num_rows: int) -> int:
        del num_rows
        return self._length

    def observe(self, observation: StepObservation) -> None:
        """Nothing to learn."""


class ScheduledDraftLength:
    """vLLM's `num_speculative_tokens_per_batch_size`: (first, last, drafts) by number of rows, 1-based, inclusive.

    Between two ranges and after the last, the range before holds. No entry exceeds `num_speculative_tokens`.
    """

    def __init__(self, schedule: Sequence[tuple[int, int, int]], num_speculative_tokens: int) -> None:
        self._starts = sorted((first, min(drafts, num_speculative_tokens)) for first, _, drafts in schedule)

    def choose(self, num_rows: int) -> int:
        return [drafts for first, drafts in self._starts if first <= max(1, num_rows)][-1]

    def observe(self, observation: StepObservation) -> None:
        """Nothing to learn."""


class _Acceptance:
    """Fading counts per position: of the drafts reached, how many were accepted."""

    __slots__ = ("_accepted", "_reached")

    def __init__(self, max_length: int) -> None:
        self._reached = [_PRIOR_ROWS] * max_length
        self._accepted = [_PRIOR_ROWS * _PRIOR_SHARE] * max_length

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        for i in range(min(num_drafted, num_accepted + 1)):
            keep = 1.0 - 1.0 / MEMORY_ROWS
            self._reached[i] = self._reached[i] * keep + 1.0
            self._accepted[i] = self._accepted[i] * keep + (1.0 if i < num_accepted else 0.0)

    def tokens(self, length: int) -> float:
        """Expected tokens of one row in a step with `length` drafts."""
        expected, alive = 1.0, 1.0
        for accepted, reached in zip(self._accepted[:length], self._reached[:length], strict=True):
            alive *= accepted / reached
            expected += alive
        return expected


class _StepTimes:
    """Running mean of the step time at each length, for one number of rows. Unmeasured lengths are scaled from `shape`,
    what another number of rows took at every length; without it they are interpolated.
    """

    __slots__ = ("_counts", "_means", "shape")

    def __init__(self, shape: tuple[float, ...]) -> None:
        self.shape = shape
        self._means: dict[int, float] = {}
        self._counts: dict[int, float] = {}

    def observe(self, length: int, step_s: float, num_steps_since: int) -> None:
        """`num_steps_since` this length was last run: the longer ago, the more the new time counts."""
        if length not in self._means:
            self._means[length], self._counts[length] = step_s, 1.0
            return
        mean = self._means[length]
        faded = self._counts[length] * (1.0 - 1.0 / FADING_STEPS) ** (num_steps_since - 1)
        count = self._counts[length] = min(faded + 1.0, MEMORY_STEPS)
        self._means[length] = mean + (min(step_s, OUTLIER * mean) - mean) / count

    @property
    def is_founded(self) -> bool:
        """Whether more than one length is known."""
        return len(self._means) > 1 or len(self.shape) > 0

    def is_measured(self, length: int) -> bool:
        return length in self._means

    def seconds(self, length: int) -> float:
        known = sorted(self._means)
        if length in self._means:
            return self._means[length]
        if self.shape:
            nearest = min(known, key=lambda k: abs(k - length))
            return self._means[nearest] * self.shape[length] / self.shape[nearest]
        if len(known) == 1:
            growth = 1.0 + _GUESSED_GROWTH * (length - known[0])
            return self._means[known[0]] * max(growth, _GUESSED_GROWTH)
        below = [k for k in known if k < length]
        above = [k for k in known if k > length]
        if below and above:
            low, high = below[-1], above[0]
        else:
            low, high = (known[-2], known[-1]) if below else (known[0], known[1])
        slope = max(0.0, (self._means[high] - self._means[low]) / (high - low))
        return max(self._means[low] + slope * (length - low), 0.5 * min(self._means.values()))


class _Load:
    """What is known about one number of rows: its step times, where it stands, and what it may spend on looking."""

    __slots__ = ("budget_s", "current", "dwell", "last_seen", "num_steps", "times")

    def __init__(self, max_length: int, shape: tuple[float, ...]) -> None:
        self.times = _StepTimes(shape)
        self.current = max_length
        self.dwell = 0
        self.budget_s = 0.0
        self.num_steps = 0
        self.last_seen = [-1] * (max_length + 1)


class AdaptiveDraftLength:
    """Chooses from 0 to `max_length` for each number of rows by itself; acceptance is learnt from all of them."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._acceptance = _Acceptance(max_length)
        self._loads: dict[int, _Load] = {}

    def choose(self, num_rows: int) -> int:
        load = self._loads.get(num_rows)
        if load is None:
            nearest = self._nearest(num_rows)
            return self._max_length if nearest is None else nearest.current
        look = self._look(load)
        return load.current if look is None else look

    def observe(self, observation: StepObservation) -> None:
        for drafted, accepted in zip(observation.num_drafted, observation.num_accepted, strict=True):
            self._acceptance.observe(drafted, accepted)
        load = self._loads.get(observation.num_rows)
        if load is None:
            nearest = self._nearest(observation.num_rows)
            shape: tuple[float, ...] = ()
            if nearest is not None and nearest.times.is_founded:
                shape = tuple([nearest.times.seconds(k) for k in range(self._max_length + 1)])
            load = self._loads[observation.num_rows] = _Load(self._max_length, shape)
            load.current = observation.num_speculative_tokens
        length = observation.num_speculative_tokens
        load.budget_s += LOOK_SHARE * observation.step_s
        if length != load.current:
            load.budget_s = max(0.0, load.budget_s - self._loss_s(load, length))
        load.num_steps += 1
        load.times.observe(length, observation.step_s, load.num_steps - load.last_seen[length])
        load.last_seen[length] = load.num_steps
        self._settle(load)

    def _nearest(self, num_rows: int) -> _Load | None:
        nearest = min(self._loads, key=lambda n: abs(n - num_rows), default=None)
        return None if nearest is None else self._loads[nearest]

    def _rate(self, load: _Load, length: int) -> float:
        return self._acceptance.tokens(length) / load.times.seconds(length)

    def _settle(self, load: _Load) -> None:
        load.dwell += 1
        if load.dwell < DWELL_STEPS:
            return
        best = max(range(self._max_length + 1), key=lambda k: self._rate(load, k))
        if self._rate(load, best) > SWITCH_GAIN * self._rate(load, load.current):
            load.current, load.dwell = best, 0

    def _loss_s(self, load: _Load, length: int) -> float:
        """The time that one step at `length` wastes, against the current length's pace."""
        needed = self._acceptance.tokens(length) / self._rate(load, load.current)
        return max(0.0, load.times.seconds(length) - needed)

    def _survey(self, load: _Load) -> int | None:
        """Half of the longest, then the shortest that drafts: the others lie between them or near."""
        lengths = ((self._max_length + 1) // 2, min(1, self._max_length - 1))
        return next((k for k in lengths if k >= 0 and not load.times.is_measured(k)), None)

    def _look(self, load: _Load) -> int | None:
        if load.num_steps in SURVEY_STEPS and not load.times.shape:
            return self._survey(load)
        if load.num_steps % LOOK_EVERY_STEPS:
            return None
        others = [k for k in range(self._max_length + 1) if k != load.current]
        if not others:
            return None
        stalest = min(others, key=lambda k: (load.last_seen[k], abs(k - load.current)))
        return stalest if self._loss_s(load, stalest) <= load.budget_s else None
