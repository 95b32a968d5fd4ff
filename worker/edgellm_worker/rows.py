"""The jobs in the engine: who sits in which row, and what each engine event makes of them.

A row leaves this table the moment its job's fate is known; what its engine still says of it then falls on the floor
(the two may cross).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import structlog

from edgellm_producer.wire import BatchInfo, ErrorCode, ErrorInfo, FinishReason, Status
from edgellm_worker.batching import Batch
from edgellm_worker.engine.api import EngineEvent, EngineFailure, EngineHandle, EngineReady, RowUpdate, StepReport
from edgellm_worker.jobs import PreparedJob, ServedModel
from edgellm_worker.metrics import Metrics
from edgellm_worker.outbox import Outbox, Retry
from edgellm_worker.queue.api import Delivery
from edgellm_worker.retry import RetryReason
from edgellm_worker.running import CANCELLED, EXPIRED, Place, RunningJob


class Rows:
    """Owns the running jobs and speaks to the engine. Times are the clock's monotonic seconds."""

    def __init__(
        self,
        engine: EngineHandle,
        model: ServedModel,
        outbox: Outbox,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._model = model
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._running: dict[int, RunningJob] = {}
        self._timed: dict[int, RunningJob] = {}  # those with a deadline
        self._key: Hashable | None = None
        self._num_added = 0
        self._heard_at = clock()
        self._idle_since = clock()
        self._log = structlog.get_logger("edgellm_worker.rows")

    def __len__(self) -> int:
        return len(self._running)

    @property
    def key(self) -> Hashable | None:
        """The batch key of the rows that run; None when none does."""
        return self._key if self._running else None

    @property
    def runs_alone(self) -> bool:
        return any(job.prepared.delivery.runs_alone for job in self._running.values())

    @property
    def silent_s(self) -> float:
        """Since the engine last said anything while rows run; 0 when none runs."""
        return self._clock() - self._heard_at if self._running else 0.0

    def next_deadline_at(self) -> float | None:
        return min((at for job in self._timed.values() if (at := job.deadline_at) is not None), default=None)

    def add(self, batch: Batch, members: Sequence[PreparedJob]) -> None:
        """Hand the members to the engine; they are what `begin` left of the batch."""
        now = self._clock()
        self.count_idle_time()
        if not self._running:
            self._key = batch.key
            self._heard_at = now
        info = BatchInfo(id=batch.id, size=len(members), engine=self._engine.traits.name)
        for member in members:
            self._num_added += 1
            place = Place(self._num_added, info, member.delivery.attempt + 1, now, self._engine.traits)
            job = self._running[place.row_id] = RunningJob(member, place, self._model)
            if job.deadline_at is not None:
                self._timed[place.row_id] = job
            self._engine.add(place.row_id, member.request)

    def apply(self, event: EngineEvent) -> None:
        self._heard_at = self._clock()
        match event:
            case StepReport():
                self._metrics.stepped(event)
                for update in event.updates:
                    self._update(update)
            case EngineFailure():
                self._retry(event)
            case EngineReady():
                self._metrics.engine_restarted()
                self._metrics.memory(event.memory_bytes)
                self._log.info("engine ready")

    def cancel(self, job_ids: Collection[str]) -> None:
        for job in self._named(job_ids):
            self._engine.remove(job.place.row_id)
            self._end(job, Status.CANCELLED, FinishReason.CANCELLED, CANCELLED)

    def expire(self) -> None:
        """Answer the jobs whose timeout has passed, with what they have."""
        now = self._clock()
        for job in tuple(self._timed.values()):
            if job.deadline_at is not None and job.deadline_at <= now:
                self._engine.remove(job.place.row_id)
                self._end(job, Status.EXPIRED, FinishReason.CANCELLED, EXPIRED)

    def drop(self, job_ids: Collection[str]) -> None:
        """Somebody else has these jobs now; whatever this worker would still say is not wanted."""
        for job in self._named(job_ids):
            self._log.warning("lease lost", job=job.id)
            self._engine.remove(job.place.row_id)
            self._forget(job)

    def give_up(self) -> list[Delivery]:
        """Take every row out of the engine; their jobs are to be handed back."""
        jobs = tuple(self._running.values())
        for job in jobs:
            self._engine.remove(job.place.row_id)
            self._forget(job)
        return [job.prepared.delivery for job in jobs]

    def count_idle_time(self) -> None:
        now = self._clock()
        if not self._running:
            self._metrics.idled(now - self._idle_since)
        self._idle_since = now

    def _update(self, update: RowUpdate) -> None:
        job = self._running.get(update.row_id)
        if job is None:
            return
        ended = job.update(update, self._clock())
        if ended is None:
            self._outbox.stream(job)
        elif ended is FinishReason.ERROR:
            # It failed alone and would again: the job's answer, not a reason to try elsewhere.
            message = update.error or "the engine gave up on this row"
            self._end(job, Status.FAILED, ended, ErrorInfo(code=ErrorCode.ENGINE_ERROR, message=message))
        else:
            if update.finish_reason is None:
                self._engine.remove(update.row_id)  # a stop string, which the engine knows nothing of
            self._end(job, Status.OK, ended)

    def _retry(self, failure: EngineFailure) -> None:
        """The engine died with these rows: each comes back as a batch of its own."""
        self._metrics.engine_failed(hung=failure.hung)
        lost = [self._running[row_id] for row_id in failure.row_ids if row_id in self._running]
        self._log.error("engine failed", reason=failure.reason, hung=failure.hung, jobs=len(lost))
        reason = RetryReason.ENGINE_HANG if failure.hung else RetryReason.ENGINE_FAILURE
        for job in lost:
            self._forget(job)
            self._metrics.retried(reason)
            self._outbox.retry(Retry(job.prepared.delivery, reason, solo_kill=len(lost) == 1))

    def _end(
        self, job: RunningJob, status: Status, finish_reason: FinishReason, error: ErrorInfo | None = None
    ) -> None:
        self._forget(job)
        self._outbox.finish(job, job.end(status, finish_reason, self._clock(), error))

    def _forget(self, job: RunningJob) -> None:
        self._outbox.drop_stream(job.id)
        del self._running[job.place.row_id]
        self._timed.pop(job.place.row_id, None)
        if not self._running:
            self._idle_since = self._clock()

    def _named(self, job_ids: Collection[str]) -> list[RunningJob]:
        return [job for job in self._running.values() if job.id in job_ids] if job_ids else []
