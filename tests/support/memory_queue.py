"""A `WorkerQueue` in memory: the same promises, no server. Faults and other workers' acts are methods of the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from edgellm_producer.keys import Priority
from edgellm_producer.wire import Delta, Job, Reply
from edgellm_worker.outcome import Outcome
from edgellm_worker.queue.api import Answer, BeginOutcome, Delivery, QueueCounters, QueueStats
from edgellm_worker.queue.errors import QueueUnavailable


class MemoryQueue:
    """`down = True` makes every call raise, as a server that is away."""

    def __init__(self, *, max_attempts: int = 3, max_solo_kills: int = 2) -> None:
        self.lane: list[Delivery] = []
        self.held: dict[str, Delivery] = {}
        self.replies: dict[str, list[Reply | Outcome]] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.dead: dict[str, str] = {}
        self.released: list[tuple[str, bool]] = []
        self.retried: list[tuple[str, str, bool]] = []
        self.forgotten: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.taken_counts: list[int] = []
        self.num_commands = 0
        self.down = False
        self.is_closed = False
        self._max_attempts = max_attempts
        self._max_solo_kills = max_solo_kills
        self._cancelled: set[str] = set()
        self._cancel_keys: set[str] = set()
        self._lost: set[str] = set()
        self._woken = asyncio.Event()
        self._news = asyncio.Event()

    # the test's side

    def submit(self, job: Job, *, age_s: float = 0.0, runs_alone: bool = False, attempt: int = 0) -> None:
        now_ms = round(time.time() * 1000)
        enqueued = now_ms - round(age_s * 1000)
        self.attempts.setdefault(job.id, attempt)
        self.lane.append(
            Delivery(
                job=job,
                priority=job.priority,
                entry_id=f"{enqueued}-{len(self.attempts)}",
                attempt=attempt,
                enqueued_at_ms=enqueued,
                deadline_ms=None if job.timeout_s is None else enqueued + round(job.timeout_s * 1000),
                taken_at=0.0,
                taken_at_ms=0,
                runs_alone=runs_alone,
            )
        )
        self._woken.set()

    def cancel(self, job_id: str) -> None:
        self._cancel_keys.add(job_id)
        self._cancelled |= {job_id} & set(self.held)
        self._woken.set()

    def steal(self, job_id: str) -> None:
        """Another worker claims it."""
        self.held.pop(job_id)
        self._lost.add(job_id)
        self._woken.set()

    async def until(self, condition: object) -> None:
        """Wait until `condition()` holds; looks after every call the worker makes."""
        assert callable(condition)
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                try:
                    async with asyncio.timeout(0.01):
                        await self._news.wait()
                except TimeoutError:
                    continue

    async def reply(self, job_id: str) -> Reply | Outcome:
        await self.until(lambda: job_id in self.replies)
        (only,) = self.replies[job_id]
        return only

    # the worker's side

    def _command(self) -> None:
        self.num_commands += 1
        self._news.set()
        if self.down:
            raise QueueUnavailable("away")

    async def open(self) -> None:
        self._command()

    async def take(self, count: int) -> list[Delivery]:
        self._command()
        taken, self.lane = self.lane[:count], self.lane[count:]
        self.taken_counts.append(count)
        now = time.monotonic()
        out = [d._replace(taken_at=now, taken_at_ms=round(time.time() * 1000)) for d in taken]
        self.held |= {d.id: d for d in out}
        await asyncio.sleep(0)
        return out

    async def wait(self, timeout_s: float) -> None:
        if self.lane and not self.down:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
        finally:
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    async def begin(self, deliveries: Sequence[Delivery]) -> list[BeginOutcome]:
        self._command()
        return [self._begin(d) for d in deliveries]

    def _begin(self, delivery: Delivery) -> BeginOutcome:
        if delivery.id not in self.held or delivery.id in self.replies:
            return BeginOutcome.LOST
        if delivery.id in self._cancel_keys:
            return BeginOutcome.CANCELLED
        if self.attempts[delivery.id] >= self._max_attempts or delivery.solo_kills >= self._max_solo_kills:
            return BeginOutcome.EXHAUSTED
        self.attempts[delivery.id] += 1
        return BeginOutcome.STARTED

    async def finish(self, answers: Sequence[Answer]) -> list[bool]:
        self._command()
        visible = []
        for answer in answers:
            job_id = answer.delivery.id
            visible.append(job_id not in self.replies)
            self.replies.setdefault(job_id, []).append(answer.reply) if visible[-1] else None
            if answer.dead_reason:
                self.dead[job_id] = answer.dead_reason
            self.held.pop(job_id, None)
        return visible

    async def append(self, delivery: Delivery, delta: Delta) -> bool:
        self._command()
        if delivery.id not in self.held or delivery.id in self.replies:
            return False
        self.deltas.setdefault(delivery.id, []).append(delta)
        return True

    async def release(self, deliveries: Sequence[Delivery], *, begun: bool) -> None:
        self._command()
        for delivery in deliveries:
            if self.held.pop(delivery.id, None) is not None:
                self.attempts[delivery.id] -= begun
                self.released.append((delivery.id, begun))

    async def retry(self, delivery: Delivery, *, delay_s: float, reason: str, solo_kill: bool = False) -> None:
        self._command()
        if self.held.pop(delivery.id, None) is not None:
            self.retried.append((delivery.id, reason, solo_kill))
            again = delivery._replace(
                attempt=self.attempts[delivery.id],
                runs_alone=True,
                solo_kills=delivery.solo_kills + solo_kill,
            )
            self.lane.append(again)
            self._woken.set()

    def forget(self, deliveries: Sequence[Delivery]) -> None:
        self.forgotten |= {d.id for d in deliveries}

    def lost(self) -> set[str]:
        lost, self._lost = self._lost, set()
        return lost

    def cancelled(self) -> set[str]:
        cancelled, self._cancelled = self._cancelled, set()
        return cancelled

    async def stats(self) -> QueueStats:
        self._command()
        length = {p: sum(1 for d in [*self.lane, *self.held.values()] if d.priority is p) for p in Priority}
        return QueueStats(length, dict.fromkeys(Priority, 0.0), len(self.held), 0, 0, len(self.dead))

    async def sweep(self) -> None:
        self._command()

    @property
    def counters(self) -> QueueCounters:
        return QueueCounters()

    @property
    def last_reply_age_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.is_closed = True
