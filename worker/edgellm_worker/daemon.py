"""The daemon: reads jobs, forms batches, runs them, publishes what comes out.

    queue ──Reader──▶ former ──_start_next_batch──▶ Rows (engine) ──_apply_engine_events──▶ Outbox ──▶ queue

`run` is the loop; each line of it is a step of the product. Beside it run four tasks that only move things: the reader
(asks for exactly as many jobs as there are free slots), the follower (collects engine events), the outbox (publishes)
and the housekeeper (sweeps, gauges). All state is touched on the event loop only.

Stop order, on the first SIGTERM: stop reading; hand back what has not started, at once and without an attempt; let
running jobs finish within the grace, leases renewed all the while; then cancel and hand back the rest, without an
attempt; publish; close. A second SIGTERM ends the grace now.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Final

import structlog

from edgellm_producer.wire import ErrorCode, Reply, Status
from edgellm_worker.batching import Batch, BatchFormer, Candidate, EngineView, FormerConfig, Scheduling
from edgellm_worker.engine.api import EngineEvent, EngineHandle
from edgellm_worker.health import HealthSnapshot, WorkerState
from edgellm_worker.jobs import Intake, PreparedJob, ServedModel, deadline_at, unstarted
from edgellm_worker.metrics import Metrics
from edgellm_worker.outbox import DEFAULT_BUDGET_S, Outbox
from edgellm_worker.outcome import Outcome
from edgellm_worker.queue.api import Answer, BeginOutcome, Delivery, WorkerQueue
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.reader import Reader
from edgellm_worker.retry import backoff_s
from edgellm_worker.rows import Rows
from edgellm_worker.running import RunningJob
from edgellm_worker.tracing import NoTracer, Tracer

REDIS_UP_WITHIN_S: Final = 10.0
LAST_FLUSH_S: Final = 10.0
OUTBOX_LIMIT: Final = 4
"""Reading stops while more than this many times the slots wait to be published (Redis is away)."""
START_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    former: FormerConfig
    read_size: int
    block_s: float = 1.0
    sweep_s: float = 1.0
    grace_s: float = 30.0
    publish_budget_s: float = DEFAULT_BUDGET_S
    last_flush_s: float = LAST_FLUSH_S


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """What the daemon works with; whoever made them closes them."""

    queue: WorkerQueue
    engine: EngineHandle
    model: ServedModel
    metrics: Metrics
    clock: Callable[[], float]
    tracer: Tracer = field(default_factory=NoTracer)


class Daemon:
    def __init__(self, parts: DaemonParts, config: DaemonConfig) -> None:
        self._queue = parts.queue
        self._engine = parts.engine
        self._model = parts.model
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._tracer = parts.tracer
        if not parts.engine.traits.in_flight:  # it takes no row while others run, whatever the settings say
            config = replace(config, former=replace(config.former, scheduling=Scheduling.STATIC))
        self._config = config
        self._wake = asyncio.Event()
        self._former = BatchFormer(config.former, name=parts.model.worker)
        self._outbox = Outbox(parts.queue, self, parts.clock, budget_s=config.publish_budget_s)
        self._rows = Rows(parts.engine, parts.model, self._outbox, parts.metrics, parts.clock)
        self._reader = Reader(
            parts.queue,
            Intake(parts.model, parts.engine),
            block_s=config.block_s,
            room=self._room_to_read,
            deliver=self._arrived,
            woken=self._wake.set,
        )
        self._waiting: dict[str, PreparedJob] = {}  # in the former, or starting
        self._starting: Batch | None = None  # between former and engine
        self._events: deque[EngineEvent] = deque()
        self._num_arrived = 0
        self._grace_ends_at: float | None = None  # set: draining
        self._loop_at = parts.clock()
        self._reader_ended = False
        self._has_stopped = False
        self._crash: BaseException | None = None
        self._log = structlog.get_logger("edgellm_worker.daemon")

    async def run(self) -> None:
        """Serve until `stop`; when this returns every job was answered or handed back."""
        async with self._helpers():
            while not self._is_over():
                await self._something_happens()
                self._apply_engine_events()
                self._drop_lost()
                self._answer_cancelled()
                self._answer_expired()
                self._hand_back_unstarted()
                self._start_next_batch()
                self._reader.look_again()
        await self._hand_back_the_rest()

    def stop(self) -> None:
        """Drain; the second call ends the grace at once. Called on the event loop (signal handlers)."""
        now = self._clock()
        self._grace_ends_at = now + self._config.grace_s if self._grace_ends_at is None else now
        self._log.info("draining", running=len(self._rows), grace_s=round(self._grace_ends_at - now, 1))
        self._reader.stop()
        self._wake.set()

    @property
    def is_draining(self) -> bool:
        return self._grace_ends_at is not None

    @asynccontextmanager
    async def _helpers(self) -> AsyncIterator[None]:
        """The reader ends by itself when draining starts; the others are ended when the loop has."""
        reader = asyncio.create_task(self._reader.run(), name="reader")
        others = [
            asyncio.create_task(self._follow_engine(), name="engine-follower"),
            asyncio.create_task(self._outbox.run(), name="outbox"),
            asyncio.create_task(self._keep_house(), name="housekeeper"),
        ]
        reader.add_done_callback(self._note_reader_end)
        for task in (reader, *others):
            task.add_done_callback(self._note_failure)
        try:
            yield
        finally:
            self._reader.stop()
            for task in others:
                task.cancel()
            await asyncio.gather(reader, *others, return_exceptions=True)

    def _note_reader_end(self, _task: asyncio.Task[None]) -> None:
        self._reader_ended = True
        self._wake.set()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """A helper that fails is a bug: the loop ends, jobs are handed back, and `run` raises it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash = error
            self._wake.set()

    def _is_over(self) -> bool:
        if self._crash is not None:
            return True
        if self._grace_ends_at is None or not self._reader_ended or self._starting is not None:
            return False
        if self._clock() >= self._grace_ends_at:
            return True
        return not len(self._rows) and not len(self._outbox) and not len(self._former)

    async def _something_happens(self) -> None:
        now = self._clock()
        forming = self._former.next_wake(now, self._view())
        # Once the grace is over only the ends of the reader and of a starting batch are waited for: both wake the loop.
        grace_ends_at = self._grace_ends_at if self._grace_ends_at is not None and self._grace_ends_at > now else None
        times = [grace_ends_at, self._rows.next_deadline_at(), None if forming is None else now + forming]
        next_at = min((at for at in times if at is not None), default=None)
        if not self._wake.is_set():
            try:
                async with asyncio.timeout(None if next_at is None else max(0.0, next_at - now)):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        self._loop_at = self._clock()

    def _num_free(self) -> int:
        """Slots that nothing holds or is promised."""
        starting = self._starting.size if self._starting is not None else 0
        return self._engine.limits.max_batch_size - len(self._rows) - starting

    def _room_to_read(self) -> int:
        """Never more than there are free slots; nothing while nothing that is read could start."""
        if self.is_draining or not self._engine.is_ready:
            return 0
        if len(self._outbox) > OUTBOX_LIMIT * self._engine.limits.max_batch_size:
            return 0
        is_busy = len(self._rows) > 0 or self._starting is not None
        if is_busy and (self._config.former.scheduling is Scheduling.STATIC or self._rows.runs_alone):
            return 0
        return min(self._config.read_size, self._num_free() - len(self._former))

    def _arrived(self, delivery: Delivery, prepared: PreparedJob | Reply) -> None:
        self._wake.set()
        if isinstance(prepared, Reply):
            self._outbox.offer(delivery, prepared)
            return
        self._num_arrived += 1
        self._waiting[delivery.id] = prepared
        self._former.offer(
            Candidate(
                id=delivery.id,
                turn=self._num_arrived,
                priority=delivery.priority,
                enqueued_at=delivery.taken_at - (delivery.taken_at_ms - delivery.enqueued_at_ms) / 1e3,
                key=prepared.key,
                deadline_at=deadline_at(delivery),
                runs_alone=delivery.runs_alone,
            )
        )

    def _view(self) -> EngineView:
        can_start = self._engine.is_ready and self._starting is None and not self.is_draining
        return EngineView(self._num_free() if can_start else 0, self._rows.key)

    def _start_next_batch(self) -> None:
        batch = self._former.poll(self._clock(), self._view())
        if batch is not None:
            self._starting = batch
            asyncio.create_task(self._start(batch), name="start-batch").add_done_callback(self._note_started)

    def _note_started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        self._note_failure(task)
        self._wake.set()

    async def _start(self, batch: Batch) -> None:
        """Count the attempts in Redis, then hand the jobs to the engine. While Redis is away they wait again."""
        members = [self._waiting[candidate.id] for candidate in batch.members]
        try:
            outcomes = await self._queue.begin([member.delivery for member in members])
        except QueueUnavailable as error:
            self._log.warning("cannot start", batch=batch.id, error=str(error))
            await asyncio.sleep(START_PAUSE_S)
            for candidate in batch.members:
                self._former.offer(candidate)
            return
        for member, outcome in zip(members, outcomes, strict=True):
            del self._waiting[member.id]
            if outcome is not BeginOutcome.STARTED:
                self._answer_unstarted(member.delivery, outcome)
        started = [m for m, outcome in zip(members, outcomes, strict=True) if outcome is BeginOutcome.STARTED]
        if started:
            self._rows.add(batch, started)
            self._metrics.batch_closed(batch)
            self._log.info("batch", batch=batch.id, size=len(started), reason=batch.reason, running=len(self._rows))

    def _answer_unstarted(self, delivery: Delivery, outcome: BeginOutcome) -> None:
        worker = self._model.worker
        if outcome is BeginOutcome.CANCELLED:
            self._outbox.offer(delivery, unstarted(delivery, worker, Status.CANCELLED))
        elif outcome is BeginOutcome.EXHAUSTED:
            code = ErrorCode.POISON if delivery.solo_kills else ErrorCode.TOO_MANY_ATTEMPTS
            self._outbox.offer(delivery, unstarted(delivery, worker, Status.FAILED, code=code), dead_reason=code)

    async def _follow_engine(self) -> None:
        while True:
            self._events.append(await self._engine.next_event())
            self._wake.set()

    def _apply_engine_events(self) -> None:
        while self._events:
            self._rows.apply(self._events.popleft())

    def _drop_lost(self) -> None:
        lost = self._queue.lost()
        self._rows.drop(lost)
        for job_id in lost:
            if self._former.withdraw(job_id):
                del self._waiting[job_id]

    def _answer_cancelled(self) -> None:
        cancelled = self._queue.cancelled()
        self._rows.cancel(cancelled)
        for job_id in cancelled:
            self._answer_waiting(job_id, Status.CANCELLED)

    def _answer_expired(self) -> None:
        self._rows.expire()
        for job_id in self._former.expired(self._clock()):
            self._answer_waiting(job_id, Status.EXPIRED)

    def _answer_waiting(self, job_id: str, status: Status) -> None:
        """Answer a job that waits in the former. One that is just starting is found out by `begin`."""
        if self._former.withdraw(job_id):
            delivery = self._waiting.pop(job_id).delivery
            self._outbox.offer(delivery, unstarted(delivery, self._model.worker, status))

    def _hand_back_unstarted(self) -> None:
        batch = self._former.drain(self._clock()) if self.is_draining else None
        if batch is not None:
            self._metrics.batch_closed(batch)
            self._outbox.release([self._waiting.pop(c.id).delivery for c in batch.members], begun=False)

    async def _hand_back_the_rest(self) -> None:
        """The last chance of what is still here; without Redis the leases run out and other workers take over."""
        self._grace_ends_at = self._clock()
        self._hand_back_unstarted()
        self._outbox.release(self._rows.give_up(), begun=True)
        pauses = backoff_s()
        try:
            async with asyncio.timeout(self._config.last_flush_s):
                while len(self._outbox):
                    try:
                        await self._outbox.flush()
                    except QueueUnavailable:
                        await asyncio.sleep(next(pauses))
        except TimeoutError:
            self._log.error("stopped with unpublished work", jobs=len(self._outbox))
        self._has_stopped = True
        if self._crash is not None:
            raise self._crash

    def answered(self, answers: Sequence[Answer], visible: Sequence[bool]) -> None:
        """The outbox wrote these answers."""
        for answer in compress(answers, visible):
            self._metrics.answered(answer.reply)
            self._tracer.answered(answer.delivery, answer.reply)
        self._log.info("job", each=[job_event(a.reply, visible=v) for a, v in zip(answers, visible, strict=True)])
        self._wake.set()

    def stream_lost(self, job: RunningJob) -> None:
        """A delta was refused: the lease is lost or the job is answered."""
        self._rows.drop([job.id])
        self._wake.set()

    def render(self) -> bytes:
        """The exposition, with the state of this very moment. Called by the HTTP threads."""
        snapshot = self.snapshot()
        self._metrics.health(snapshot, redis_up=snapshot.redis_age_s <= REDIS_UP_WITHIN_S)
        self._count_held()
        return self._metrics.render()

    def _count_held(self) -> None:
        """Called by the HTTP threads too: it counts over a copy."""
        waiting = Counter(job.delivery.priority for job in tuple(self._waiting.values()))
        self._metrics.held(len(self._rows), waiting)

    def snapshot(self) -> HealthSnapshot:
        """Read by the HTTP threads too: plain attribute reads only."""
        phase = WorkerState.DRAINING if self.is_draining else WorkerState.READY
        return HealthSnapshot(
            phase=WorkerState.STOPPED if self._has_stopped else phase,
            redis_age_s=self._queue.last_reply_age_s,
            engine_ready=self._engine.is_ready,
            engine_age_s=self._rows.silent_s,
            loop_age_s=self._clock() - self._loop_at,
        )

    async def _keep_house(self) -> None:
        """Every `sweep_s`; it also wakes the loop, so that cancellations and deadlines are seen at least this often."""
        while True:
            try:
                await self._queue.sweep()
                self._metrics.queue(await self._queue.stats())
            except QueueUnavailable as error:
                self._log.warning("cannot sweep", error=str(error))
            self._rows.count_idle_time()
            self._metrics.counters(self._queue.counters)
            self._count_held()
            self._wake.set()
            await asyncio.sleep(self._config.sweep_s)


def job_event(reply: Reply | Outcome, *, visible: bool = True) -> dict[str, object]:
    """What is logged of a job: numbers and enums, never its text."""
    error = reply.error
    return {
        "job": reply.id,
        "status": reply.status,
        "finish_reason": reply.finish_reason,
        "code": error.code if error else None,
        "field": error.field if error else None,
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "queue_ms": round(reply.timings.queue_ms, 1),
        "total_ms": round(reply.timings.total_ms, 1),
        "acceptance": round(reply.speculative.draft_acceptance_rate, 3),
        "batch": reply.batch.id if reply.batch else None,
        "attempt": reply.attempt,
        "visible": visible,
    }
