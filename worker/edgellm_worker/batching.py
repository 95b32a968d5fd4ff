"""The batch former: which waiting jobs go to the engine together, and when.

It is a pure decision: it is told the time and the state of the engine, it reads no clock and does no IO.

Order      aged lane > tenant turn (the order in which the queue handed the jobs over) > compatibility key.
           A job older than `ageing_s` counts one lane higher.
Batch      the jobs admitted together: their id, size and close reason. An idle engine gets a batch of one key; a
           running in-flight engine takes jobs of the running key into free slots at once; a static one takes none.
Linger     an idle engine may wait for company, counted from the *oldest* member's enqueue time: a job that has already
           waited that long goes at once. A running engine never waits.
Alone      a job whose last holder vanished runs in a batch of its own: its key equals nobody's.
Bound      a job may be overtaken by jobs of the running key only until it is `ageing_s` old. From then on nothing
           behind it is admitted, the running batch (bounded by max_tokens) ends, and it goes. So a job at the head of
           the order is dispatched within max(ageing_s - age, 0) + the longest rest of a running job; linger adds
           nothing to a job that has waited.

    arrivals ──offer──▶ waiting ──poll──▶ Batch
                          │ └──withdraw (cancelled, expired, lease lost)
                          └──drain──▶ handed back, attempts unchanged
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from edgellm_producer.keys import Priority


class CloseReason(StrEnum):
    """Why a batch was closed (label of `batch_close_total`)."""

    FULL = "full"  # it takes every free slot
    LINGER = "linger"  # its oldest job has waited long enough
    INCOMPATIBLE = "incompatible"  # the next job in order cannot share it
    DEADLINE = "deadline"  # waiting longer would eat a member's time
    JOIN = "join"  # in-flight: joined a running batch without any wait
    DRAIN = "drain"  # the worker stops: handed back instead of started


class Scheduling(StrEnum):
    IN_FLIGHT = "in-flight"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class FormerConfig:
    """`ageing_s` is both the lane's ageing and the bound on overtaking."""

    linger_s: float = 0.005
    ageing_s: float = 30.0
    scheduling: Scheduling = Scheduling.IN_FLIGHT


class Candidate(NamedTuple):
    """A validated job that waits for a slot. Times are monotonic seconds; `turn` is its order of arrival."""

    id: str
    turn: int
    priority: Priority
    enqueued_at: float
    key: Hashable = ()
    deadline_at: float | None = None
    runs_alone: bool = False

    @property
    def batch_key(self) -> Hashable:
        return ("alone", self.id) if self.runs_alone else ("shared", self.key)


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the former must know of the engine: `running_key` is the batch key of the rows that run, None when idle."""

    free_slots: int
    running_key: Hashable | None = None

    @property
    def is_idle(self) -> bool:
        return self.running_key is None


@dataclass(frozen=True, slots=True)
class Batch:
    """`wait_s` is how long its oldest member had waited since it was enqueued."""

    id: str
    members: tuple[Candidate, ...]
    reason: CloseReason
    wait_s: float

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def key(self) -> Hashable:
        return self.members[0].batch_key


_RANK = {priority: rank for rank, priority in enumerate(Priority)}


class BatchFormer:
    """Owns the waiting jobs. `name` prefixes the batch ids."""

    def __init__(self, config: FormerConfig, *, name: str = "batch") -> None:
        self._config = config
        self._name = name
        self._waiting: dict[str, Candidate] = {}
        self._num_batches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, candidate: Candidate) -> None:
        self._waiting[candidate.id] = candidate

    def withdraw(self, job_id: str) -> bool:
        """Take a job out; False when it is not waiting here."""
        return self._waiting.pop(job_id, None) is not None

    def expired(self, now: float) -> list[str]:
        """Ids of waiting jobs whose deadline has passed."""
        return [c.id for c in self._waiting.values() if c.deadline_at is not None and c.deadline_at <= now]

    def drain(self, now: float) -> Batch | None:
        """Everything that waits, to be handed back."""
        waiting = self._ordered(now)
        return self._close(waiting, CloseReason.DRAIN, now) if waiting else None

    def poll(self, now: float, engine: EngineView) -> Batch | None:
        """The next batch to hand to the engine now, or None."""
        if engine.free_slots <= 0 or not self._waiting:
            return None
        if not engine.is_idle and self._config.scheduling is Scheduling.STATIC:
            return None
        members, blocked = self._pick(now, engine)
        if not members:
            return None
        reason = self._reason(members, now, engine, blocked=blocked)
        return None if reason is None else self._close(members, reason, now)

    def next_wake(self, now: float, engine: EngineView) -> float | None:
        """Seconds until `poll` or `expired` may answer differently without a new event; None when never."""
        times = [c.deadline_at for c in self._waiting.values() if c.deadline_at is not None]
        if self._waiting and engine.is_idle and engine.free_slots > 0:
            oldest = min(c.enqueued_at for c in self._waiting.values())
            times.append(oldest + self._config.linger_s)
        return max(0.0, min(times) - now) if times else None

    def _ordered(self, now: float) -> list[Candidate]:
        def place(candidate: Candidate) -> tuple[int, int]:
            aged = now - candidate.enqueued_at >= self._config.ageing_s
            return max(0, _RANK[candidate.priority] - aged), candidate.turn

        return sorted(self._waiting.values(), key=place)

    def _pick(self, now: float, engine: EngineView) -> tuple[list[Candidate], bool]:
        """The members in order, and whether a job that cannot share their batch waits beside them."""
        key = engine.running_key
        members: list[Candidate] = []
        blocked = False
        for candidate in self._ordered(now):
            if len(members) == engine.free_slots:
                break
            if key is None:
                key = candidate.batch_key
            if candidate.batch_key == key:
                members.append(candidate)
                continue
            blocked = True
            if now - candidate.enqueued_at >= self._config.ageing_s:
                break  # the bound on overtaking
        return members, blocked

    def _reason(self, members: list[Candidate], now: float, engine: EngineView, *, blocked: bool) -> CloseReason | None:
        if len(members) == engine.free_slots:
            return CloseReason.FULL
        if blocked or members[0].runs_alone:
            return CloseReason.INCOMPATIBLE
        if not engine.is_idle:
            return CloseReason.JOIN
        closes_at = min(c.enqueued_at for c in members) + self._config.linger_s
        if now >= closes_at:
            return CloseReason.LINGER
        if any(c.deadline_at is not None and c.deadline_at <= closes_at for c in members):
            return CloseReason.DEADLINE
        return None

    def _close(self, members: list[Candidate], reason: CloseReason, now: float) -> Batch:
        for member in members:
            del self._waiting[member.id]
        self._num_batches += 1
        oldest = min(c.enqueued_at for c in members)
        return Batch(f"{self._name}-{self._num_batches}", tuple(members), reason, max(0.0, now - oldest))
