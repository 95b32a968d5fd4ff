"""The asyncio client.

One `Producer` per process and event loop; it may be shared by any number of tasks, never by threads or across a fork
(`BlockingProducer` is for threads). It connects on first use: a pool for commands, one connection for all waits.

Every command it sends may run twice without harm (a submit carries its job's id), so commands are repeated by
themselves when a connection breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

from edgellm_producer.connect import Commands, LinkOptions, in_words
from edgellm_producer.envelope import Envelope, seal
from edgellm_producer.errors import EdgellmError, JobRejected, QueueFull, QueueUnreachable, UnknownJob
from edgellm_producer.job import CancelOutcome, JobState, JobStatus, SubmittedJob
from edgellm_producer.keys import Keys, new_job_ids
from edgellm_producer.reader import BLOCK_MARGIN_S, BLOCK_MS, Feed, ReplyReader
from edgellm_producer.scripts import run, script
from edgellm_producer.wire import ErrorCode, ErrorInfo, FinishReason, Reply, Status, encode

COMMAND_RETRIES: Final = 3
MAX_BULK_JOBS: Final = 500
MAX_BULK_BYTES: Final = 4 << 20
FULL_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class MapOutcome:
    """One job of `map`: its place in the input, and its reply or the error that it ended with."""

    index: int
    reply: Reply | None
    error: EdgellmError | None


@contextmanager
def _mapped_errors() -> Iterator[None]:
    from redis.exceptions import RedisError  # noqa: PLC0415

    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnreachable(in_words(error)) from error


class Producer:
    """`async with Producer("redis://localhost") as producer: job = await producer.submit("Hello", max_tokens=16)`

    `password` is for those who keep it out of the URL. A wrong URL or queue name is a ValueError.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379",
        *,
        queue: str = "default",
        password: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.keys = Keys(queue)
        options = LinkOptions(
            timeout_s=timeout_s, retries=COMMAND_RETRIES, password=password, route_key=self.keys.config
        )
        with _mapped_errors():
            self._commands = Commands(url, options)
            self._blocked = Commands(
                url, replace(options, timeout_s=BLOCK_MS / 1000 + BLOCK_MARGIN_S, max_connections=1, retries=0)
            )
        self._reader = ReplyReader(self._blocked, self._commands)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._reader.close()
        await self._blocked.close()
        await self._commands.close()

    async def submit(self, prompt: str | None = None, **fields: Any) -> SubmittedJob:
        """Enqueue one job. `fields` are those of `wire.Job`: messages, max_tokens, temperature, stream, timeout_s, ...

        Raises `JobRejected` (a field is wrong, or another body holds the idempotency key) and `QueueFull`.
        """
        envelope = seal({"prompt": prompt, **fields})
        (answer,) = await self._run("submit", envelope.arguments())
        return self._submitted(envelope, answer)

    async def submit_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[SubmittedJob]:
        """Enqueue many jobs, in order, in one round trip per 500 jobs or 4 MiB.

        A chunk is validated whole before it is sent, while the server works on the one before. The first job that is
        refused (`JobRejected`, `QueueFull`) ends the call with its chunk; the error's `accepted_ids` are in the queue.
        """
        submitted: list[SubmittedJob] = []
        in_flight: asyncio.Task[list[SubmittedJob]] | None = None
        try:
            for chunk in _chunks(jobs):
                if in_flight is not None:
                    submitted += await in_flight
                in_flight = asyncio.create_task(self._submit_chunk(chunk))
                await asyncio.sleep(0)  # it is on its way now
            return submitted if in_flight is None else submitted + await in_flight
        except (JobRejected, QueueFull) as error:
            submitted += await _jobs_of(in_flight, error)
            error.accepted_ids = (*(job.id for job in submitted), *error.accepted_ids)
            raise
        finally:
            if in_flight is not None:
                in_flight.cancel()

    async def _submit_chunk(self, chunk: Sequence[Envelope]) -> list[SubmittedJob]:
        answers = await self._run("submit", [word for envelope in chunk for word in envelope.arguments()])
        submitted: list[SubmittedJob] = []
        refused: JobRejected | QueueFull | None = None
        for envelope, answer in zip(chunk, answers, strict=True):
            try:
                submitted.append(self._submitted(envelope, answer))
            except (JobRejected, QueueFull) as error:
                refused = refused or error
        if refused is not None:
            refused.accepted_ids = tuple(job.id for job in submitted)
            raise refused
        return submitted

    def _submitted(self, envelope: Envelope, answer: Sequence[bytes]) -> SubmittedJob:
        outcome = answer[0]
        if outcome == b"full":
            raise QueueFull(int(answer[1]), int(answer[2]))
        if outcome == b"conflict":
            message = f"{envelope.job.idempotency_key!r} belongs to job {answer[1].decode()}, whose body differs"
            raise JobRejected(ErrorCode.IDEMPOTENCY_CONFLICT, message, field="idempotency_key")
        if outcome == b"known":
            return SubmittedJob(self, answer[1].decode(), is_duplicate=True)
        return SubmittedJob(self, envelope.job.id)

    def job(self, job_id: str) -> SubmittedJob:
        """A job submitted earlier, here or elsewhere."""
        return SubmittedJob(self, job_id, is_attached=True)

    async def status(self, job_id: str) -> JobStatus:
        (row,) = await self._run("status", [job_id])
        state, attempt, enqueued_at, status, has_reply = row
        return JobStatus(
            id=job_id,
            state=JobState(state.decode()),
            attempt=int(attempt),
            enqueued_at_ms=int(enqueued_at),
            status=Status(status.decode()) if status else None,
            has_reply=bool(has_reply),
        )

    async def cancel(self, job_id: str) -> CancelOutcome:
        """Raises `UnknownJob`. A job that has not started is answered at once, by this call."""
        info = ErrorInfo(code=ErrorCode.CANCELLED, message="cancelled before it ran")
        reply = Reply(id=job_id, status=Status.CANCELLED, finish_reason=FinishReason.CANCELLED, error=info)
        answer = await self._run("cancel", [job_id, encode(reply)])
        outcome = answer[0].decode()
        if outcome == "unknown":
            raise UnknownJob(f"this queue does not know {job_id}")
        return CancelOutcome(outcome)

    async def has_worker(self) -> bool:
        """Whether a worker serves this queue, or did within the last minute. Jobs wait where none does."""
        return bool(await self.call("EXISTS", self.keys.lease))

    async def map(
        self, jobs: Iterable[Mapping[str, Any]], *, concurrency: int = 64, timeout_s: float | None = None
    ) -> AsyncIterator[MapOutcome]:
        """Run any number of jobs, at most `concurrency` at a time, and yield each as it ends.

        A full queue is waited for; a job's own error is yielded, so that one bad job stops nothing. `jobs` is read only
        as fast as places become free.
        """
        source = enumerate(jobs)
        running: set[asyncio.Task[MapOutcome]] = set()
        try:
            while True:
                while len(running) < concurrency and (item := next(source, None)) is not None:
                    running.add(asyncio.create_task(self._run_one(*item, timeout_s)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_one(self, index: int, fields: Mapping[str, Any], timeout_s: float | None) -> MapOutcome:
        try:
            while True:
                try:
                    job = await self.submit(**fields)
                    break
                except QueueFull:
                    await asyncio.sleep(FULL_PAUSE_S)
            return MapOutcome(index, await job.result(timeout_s), None)
        except EdgellmError as error:
            return MapOutcome(index, None, error)

    async def call(self, *words: str | bytes | int) -> Any:
        """One plain command, for the modules beside this one."""
        with _mapped_errors():
            return await self._commands.execute(*words)

    def feed(self, job_id: str) -> AbstractContextManager[Feed]:
        return self._reader.feed(self.keys.reply(job_id))

    async def _run(self, name: str, args: Sequence[str | bytes | int]) -> Any:
        with _mapped_errors():
            return await run(self._commands.execute, script(name), self.keys.config, args)


async def _jobs_of(
    in_flight: asyncio.Task[list[SubmittedJob]] | None, error: JobRejected | QueueFull
) -> list[SubmittedJob]:
    """What the chunk before the refused one got in; its own refusal comes second, its accepted ids do not get lost."""
    try:
        return [] if in_flight is None else await in_flight
    except (JobRejected, QueueFull) as other:
        if other is not error:
            error.accepted_ids = other.accepted_ids
        return []


def _chunks(jobs: Iterable[Mapping[str, Any]]) -> Iterator[list[Envelope]]:
    """Sealed jobs in chunks of bounded number and size; the ids of a chunk are drawn in one go."""
    bodies = iter(jobs)
    chunk: list[Envelope] = []
    while batch := list(islice(bodies, MAX_BULK_JOBS)):
        ids = new_job_ids(len(batch))
        sealed = [seal({"id": job_id, **fields}) for job_id, fields in zip(ids, batch, strict=True)]
        size = 0
        for envelope in sealed:
            if chunk and size + len(envelope.packed) > MAX_BULK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(envelope)
            size += len(envelope.packed)
        yield chunk
        chunk = []
