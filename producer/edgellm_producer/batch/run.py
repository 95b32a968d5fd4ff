"""Running a batch file: a bounded window of jobs, answers written as they come."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from edgellm_producer.batch.lines import (
    BadLine,
    BatchLine,
    duplicate_line,
    failure_line,
    job_id,
    parse_line,
    success_line,
)
from edgellm_producer.batch.output import BatchOutput
from edgellm_producer.batch.progress import Progress
from edgellm_producer.client import Producer
from edgellm_producer.errors import JobRejected, QueueFull, QueueUnreachable, ResultExpired, UnknownJob
from edgellm_producer.openai.responses import (
    ErrorBody,
    ResponseShape,
    body_from_reply,
    error_from_code,
    error_from_rejection,
)
from edgellm_producer.wire import ErrorCode, Reply, Status

_PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MAX_RESUBMITS: Final = 3


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """`window` jobs are in the queue at most; `unreachable_s` is how long an outage of the queue is waited out."""

    window: int = 256
    timeout_s: float | None = None
    tenant: str | None = None
    priority: str | None = None
    model: str | None = None
    unreachable_s: float = 300.0

    def job_fields(self) -> dict[str, Any]:
        given = {"timeout_s": self.timeout_s, "tenant": self.tenant, "priority": self.priority, "model": self.model}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BatchSummary:
    lines: int
    failed: int


class BatchRun:
    def __init__(self, producer: Producer, sink: BatchOutput, progress: Progress, options: BatchOptions) -> None:
        self._producer = producer
        self._sink = sink
        self._progress = progress
        self._options = options
        self._seen: set[int] = set()

    async def run(self, source: Iterable[bytes]) -> BatchSummary:
        """Answer every line of `source` that is not answered yet. A failed line never stops the others.

        `QueueUnreachable` when the queue stays away too long: what was written stays, the run can be resumed.
        """
        try:
            await self._run(source)
        except* QueueUnreachable as group:
            raise group.exceptions[0] from None
        finally:
            self._progress.show(time.monotonic())
            self._progress.end()
        return BatchSummary(self._progress.done, self._progress.failures.total())

    async def _run(self, source: Iterable[bytes]) -> None:
        places = asyncio.Semaphore(self._options.window)
        async with asyncio.TaskGroup() as group:
            for number, text in enumerate(source, 1):
                if not text.strip():
                    continue
                line = self._checked(parse_line(number, text))
                if number in self._sink.answered:
                    continue
                await places.acquire()
                group.create_task(self._answer(line, places))

    def _checked(self, line: BatchLine | BadLine) -> BatchLine | BadLine:
        """Only a hash of each custom_id is kept, so that memory stays flat over a long file."""
        if isinstance(line, BadLine):
            return line
        mark = hash(line.custom_id)
        if mark in self._seen:
            return duplicate_line(line)
        self._seen.add(mark)
        return line

    async def _answer(self, line: BatchLine | BadLine, places: asyncio.Semaphore) -> None:
        try:
            outcome = await self._outcome(line)
            if isinstance(outcome, ErrorBody):
                self._sink.write(failure_line(self._sink.run_id, line.number, line.custom_id, outcome))
                self._progress.failed(line.number, outcome.error["code"], outcome.error["message"])
            else:
                self._sink.write(outcome)
            self._progress.answered(time.monotonic())
        finally:
            places.release()

    async def _outcome(self, line: BatchLine | BadLine) -> bytes | ErrorBody:
        """The output line of a job that succeeded, or why there is none."""
        if isinstance(line, BadLine):
            return line.error
        try:
            reply = await self._reply(line)
        except JobRejected as error:
            return error_from_rejection(error)
        if reply.status is not Status.OK:
            info = reply.error
            code, message = (info.code, info.message) if info else (ErrorCode.ENGINE_ERROR, reply.status.value)
            return error_from_code(code, message, info.field if info else None)
        model = str(line.request.fields.get("model") or self._options.model or "")
        shape = ResponseShape(line.request.endpoint, reply.id, model, int(time.time()))
        return success_line(self._sink.run_id, line, body_from_reply(shape, reply))

    async def _reply(self, line: BatchLine) -> Reply:
        """Submit until the queue takes it, then wait; a reply that expired while nobody was reading is made again."""
        for resubmits in range(_MAX_RESUBMITS + 1):
            suffix = f".{resubmits}" if resubmits else ""
            fields = {**self._options.job_fields(), **line.request.fields}
            try:
                return await self._patiently({**fields, "id": job_id(self._sink.run_id, line.number) + suffix})
            except (ResultExpired, UnknownJob):
                continue
        raise JobRejected(ErrorCode.TIMEOUT, f"its reply was gone before it was read, {_MAX_RESUBMITS + 1} times")

    async def _patiently(self, fields: dict[str, Any]) -> Reply:
        """The same id may be submitted again after any doubt: the queue takes it for the same job."""
        failing_since: float | None = None
        num_refusals = 0
        while True:
            try:
                job = await self._producer.submit(**fields)
                failing_since, num_refusals = None, 0
                return await job.reply()
            except QueueFull:
                failing_since = None
            except QueueUnreachable:
                now = time.monotonic()
                failing_since = failing_since if failing_since is not None else now
                if now - failing_since > self._options.unreachable_s:
                    raise
            pause_s = _PAUSES_S[min(num_refusals, len(_PAUSES_S) - 1)]
            num_refusals += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries
