"""What the daemon sees of the queue. Everything Redis lies behind these types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from edgellm_producer.keys import Priority
from edgellm_producer.wire import Delta, Job, Reply
from edgellm_worker.outcome import Outcome


class Delivery(NamedTuple):
    """One job that this worker holds a lease on.

    attempt        how often it was handed to an engine before (0 for a fresh job)
    enqueued_at_ms server time of the submit, also for retries; deadline_ms likewise, None without timeout
    taken_at       this process's monotonic seconds when the read returned; taken_at_ms the server's time of that read,
                   so that ages and deadlines never compare two machines' clocks
    runs_alone     its last holder vanished while it ran: give it a batch of its own
    """

    job: Job
    priority: Priority
    entry_id: str
    attempt: int
    enqueued_at_ms: int
    deadline_ms: int | None
    taken_at: float
    taken_at_ms: int
    runs_alone: bool = False
    solo_kills: int = 0

    @property
    def id(self) -> str:
        return self.job.id


class BeginOutcome(StrEnum):
    STARTED = "started"  # the attempt is counted; hand it to the engine
    LOST = "lost"  # another worker owns it, or it is answered: forget it
    CANCELLED = "cancelled"  # answer it as cancelled
    EXHAUSTED = "exhausted"  # no attempt is left: dead-letter it


class Answer(NamedTuple):
    """A reply to publish. `dead_reason` set: the job also goes to the dead-letter stream."""

    delivery: Delivery
    reply: Reply | Outcome
    dead_reason: str | None = None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Queue-wide numbers, the same from every worker. Lengths per lane include entries in flight."""

    length: dict[Priority, int]
    oldest_s: dict[Priority, float]
    pending: int
    held: int
    delayed: int
    dead: int

    @property
    def lag(self) -> int:
        return sum(self.length.values()) - self.pending


@dataclass(frozen=True, slots=True)
class QueueCounters:
    """This worker's own totals since `open`. `answered` counts jobs answered inside `take` and `sweep` (malformed,
    expired, cancelled before start) by `ErrorCode`; `renewal_age_s` is how long ago leases were last renewed.
    """

    num_reclaimed: int = 0
    num_reconnects: int = 0
    renewal_age_s: float = 0.0
    answered: Mapping[str, int] = field(default_factory=dict)


class WorkerQueue(Protocol):
    """All methods raise `QueueUnavailable` when Redis cannot be reached or refuses; the caller keeps what it has."""

    async def open(self) -> None:
        """Check the server, create the groups (from id 0), register the worker, start the lease keeper."""

    async def take(self, count: int) -> list[Delivery]:
        """Up to `count` deliveries without blocking, reclaimed ones included. Entries that cannot be decoded or are
        invalid are answered and dead-lettered inside; expired and cancelled ones are answered inside.
        """

    async def wait(self, timeout_s: float) -> None:
        """Return when a lane may have something, at the latest after timeout_s. Consumes nothing itself that `take`
        does not return next.
        """

    def wake(self) -> None:
        """Make a running `wait` return."""

    async def begin(self, deliveries: Sequence[Delivery]) -> list[BeginOutcome]: ...

    async def finish(self, answers: Sequence[Answer]) -> list[bool]:
        """Publish in one round trip; True where this answer became the visible one."""

    async def append(self, delivery: Delivery, delta: Delta) -> bool:
        """Add a delta to the reply stream; False when the lease is lost or the job is answered."""

    async def release(self, deliveries: Sequence[Delivery], *, begun: bool) -> None:
        """Hand back at once; `begun` undoes the attempt that `begin` counted."""

    async def retry(self, delivery: Delivery, *, delay_s: float, reason: str, solo_kill: bool = False) -> None:
        """Back to the queue after an infrastructure fault (never for the job's own)."""

    def forget(self, deliveries: Sequence[Delivery]) -> None:
        """Stop renewing these at once, without asking Redis: their lease runs out and another worker takes them."""

    def lost(self) -> set[str]:
        """Ids of held jobs whose lease another worker took; cleared by reading."""

    def cancelled(self) -> set[str]:
        """Ids of held jobs that were cancelled; cleared by reading."""

    async def stats(self) -> QueueStats: ...

    async def sweep(self) -> None:
        """Promote delayed and held, expire, reap consumers; called every sweep interval."""

    @property
    def counters(self) -> QueueCounters: ...

    @property
    def last_reply_age_s(self) -> float:
        """Seconds since any Redis reply, renewals included (health)."""

    async def close(self) -> None: ...
