"""What must reach Redis, kept until it does.

    offer(answer)      a finished job's one reply; all that are ready leave in one round trip
    hand_back(...)     retries and releases
    stream(job)        a running job whose deltas are due

Order for one job: its deltas, then its answer. While Redis is away nothing is dropped and nothing is acknowledged:
everything stays here, with its lease renewed by the queue, and is tried again after a growing pause. A result that
could not be written within `budget_s` keeps waiting, but its lease is no longer renewed: another worker may do the
work again, and whichever answer is first stands (the fence is in Redis).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from edgellm_producer.wire import Reply
from edgellm_worker.outcome import Outcome
from edgellm_worker.queue.api import Answer, Delivery, WorkerQueue
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.retry import RetryReason, backoff_s, retry_delay_s
from edgellm_worker.running import RunningJob

DEFAULT_BUDGET_S: Final = 300.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Retry:
    """An infrastructure fault took this job's attempt; `solo_kill`: it was the engine's only row."""

    delivery: Delivery
    reason: RetryReason
    solo_kill: bool


@dataclass(frozen=True, slots=True)
class Release:
    deliveries: tuple[Delivery, ...]
    begun: bool


class OutboxListener(Protocol):
    def answered(self, answers: Sequence[Answer], visible: Sequence[bool]) -> None:
        """Written; not `visible`: somebody else's answer was first and this one is dropped."""

    def stream_lost(self, job: RunningJob) -> None:
        """Its lease is lost or it is answered: stop working on it."""


@dataclass(slots=True)
class _Waiting:
    answers: dict[str, tuple[Answer, float]] = field(default_factory=dict)
    retries: list[Retry] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    streams: dict[str, RunningJob] = field(default_factory=dict)
    last_deltas: dict[str, RunningJob] = field(default_factory=dict)


class Outbox:
    """`run` publishes until it is cancelled; `flush` once, now. The two never overlap."""

    def __init__(
        self,
        queue: WorkerQueue,
        listener: OutboxListener,
        clock: Callable[[], float],
        *,
        budget_s: float = DEFAULT_BUDGET_S,
    ) -> None:
        self._queue = queue
        self._listener = listener
        self._clock = clock
        self._budget_s = budget_s
        self._waiting = _Waiting()
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._log = structlog.get_logger("edgellm_worker.outbox")

    def __len__(self) -> int:
        """Jobs whose answer, retry or release is not written yet."""
        waiting = self._waiting
        return len(waiting.answers) + len(waiting.retries) + sum(len(r.deliveries) for r in waiting.releases)

    def offer(self, delivery: Delivery, reply: Reply | Outcome, *, dead_reason: str | None = None) -> None:
        self._waiting.answers[delivery.id] = (Answer(delivery, reply, dead_reason), self._clock())
        self._wake.set()

    def finish(self, job: RunningJob, reply: Reply | Outcome, *, dead_reason: str | None = None) -> None:
        """As `offer`, with the job's last delta before it."""
        self._waiting.streams.pop(job.id, None)
        if job.prepared.delivery.job.stream:
            self._waiting.last_deltas[job.id] = job
        self.offer(job.prepared.delivery, reply, dead_reason=dead_reason)

    def retry(self, retry: Retry) -> None:
        self.drop_stream(retry.delivery.id)
        self._waiting.retries.append(retry)
        self._wake.set()

    def release(self, deliveries: Iterable[Delivery], *, begun: bool) -> None:
        given = tuple(deliveries)
        if given:
            self._waiting.releases.append(Release(given, begun))
            self._wake.set()

    def stream(self, job: RunningJob) -> None:
        if job.prepared.delivery.job.stream:
            self._waiting.streams[job.id] = job
            self._wake.set()

    def drop_stream(self, job_id: str) -> None:
        self._waiting.streams.pop(job_id, None)

    async def run(self) -> None:
        pauses = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            await self._something_is_due()
            await asyncio.sleep(0)  # the reader was woken too: Redis reads the next jobs while these answers are packed
            try:
                await self.flush()
                pauses = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            except QueueUnavailable as error:
                pause_s = next(pauses)
                self._log.warning("cannot publish", error=str(error), waiting=len(self), again_in_s=pause_s)
                self._give_up_leases()
                await asyncio.sleep(pause_s)
                self._wake.set()

    async def flush(self) -> None:
        """Write everything that is due. Raises `QueueUnavailable`; what was not written is still here then."""
        async with self._lock:
            self._wake.clear()
            await self._send_deltas()
            await self._send_answers()
            await self._send_back()

    async def _something_is_due(self) -> None:
        due = [at for job in self._waiting.streams.values() if (at := job.delta_due_at()) is not None]
        timeout_s = max(0.0, min(due) - self._clock()) if due else None
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _send_deltas(self) -> None:
        last = self._waiting.last_deltas
        if not last and not self._waiting.streams:
            return
        running = [job for job_id, job in self._waiting.streams.items() if job_id not in last]
        await _all(self._send_delta(job, last=False) for job in running)
        await _all(self._send_delta(job, last=True) for job in tuple(last.values()))

    async def _send_delta(self, job: RunningJob, *, last: bool) -> None:
        """At most one delta for a running job; for a finished one all that is left: one unconfirmed and one new."""
        while (delta := job.next_delta(self._clock(), last=last)) is not None:
            if not await self._queue.append(job.prepared.delivery, delta):
                self._waiting.streams.pop(job.id, None)
                self._waiting.last_deltas.pop(job.id, None)
                self._listener.stream_lost(job)
                return
            job.delta_sent(self._clock())
        if last:
            self._waiting.last_deltas.pop(job.id, None)

    async def _send_answers(self) -> None:
        # A job whose last delta is not out yet waits for it; it joined after _send_deltas looked.
        ready = [a for job_id, (a, _) in self._waiting.answers.items() if job_id not in self._waiting.last_deltas]
        if not ready:
            return
        visible = await self._queue.finish(ready)
        for answer in ready:
            del self._waiting.answers[answer.delivery.id]
        self._listener.answered(ready, visible)

    async def _send_back(self) -> None:
        while self._waiting.releases:
            release = self._waiting.releases[0]
            await self._queue.release(release.deliveries, begun=release.begun)
            self._waiting.releases.pop(0)
        while self._waiting.retries:
            retry = self._waiting.retries[0]
            await self._queue.retry(
                retry.delivery,
                delay_s=retry_delay_s(retry.delivery.attempt + 1),
                reason=retry.reason,
                solo_kill=retry.solo_kill,
            )
            self._waiting.retries.pop(0)

    def _give_up_leases(self) -> None:
        now = self._clock()
        late: Sequence[Delivery] = [
            answer.delivery for answer, since in self._waiting.answers.values() if now - since > self._budget_s
        ]
        if late:
            self._queue.forget(late)


async def _all(sends: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all to their end before raising what one of them raised: no send is left behind on its own."""
    for outcome in await asyncio.gather(*sends, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
