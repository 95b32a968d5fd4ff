"""A submitted job as its producer sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from edgellm_producer.alone import alone_in_words
from edgellm_producer.errors import (
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobRejected,
    ProtocolError,
    QueueUnreachable,
    ResultExpired,
    ResultTimeout,
    UnknownJob,
)
from edgellm_producer.reader import Feed, ReplyEntry
from edgellm_producer.streaming import DeltaMerger, Restarted
from edgellm_producer.wire import Delta, Reply, Status, decode_delta, decode_reply

if TYPE_CHECKING:
    from edgellm_producer.client import Producer

CHECK_AFTER_S: Final = 5.0
"""How long nothing is heard of a job before the queue is asked whether it still knows it."""
OUTAGE_S: Final = 30.0
"""How long a wait goes on while the queue cannot be asked: Redis restarts, or another server takes its place."""


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DELAYED = "delayed"  # waits to be tried again
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """`status` is the answer's once the state is DONE; `has_reply` tells whether the answer itself is still kept."""

    id: str
    state: JobState
    attempt: int
    enqueued_at_ms: int
    status: Status | None
    has_reply: bool


class CancelOutcome(StrEnum):
    CANCELLED = "cancelled"  # it had not started; its answer says cancelled
    REQUESTED = "requested"  # it runs; its worker stops it within a step
    DONE = "done"  # it was answered before


_ERRORS: Final[dict[Status, type[JobError]]] = {
    Status.REJECTED: JobRejected,
    Status.FAILED: JobFailed,
    Status.EXPIRED: JobExpired,
    Status.CANCELLED: JobCancelled,
}


def raise_for_status(reply: Reply) -> Reply:
    """The reply itself when its status is ok, else the error that it stands for."""
    error = _ERRORS.get(reply.status)
    if error is None:
        return reply
    info = reply.error
    code, message = (info.code, info.message) if info else (reply.status.value, reply.status.value)
    raise error(code, message, field=info.field if info else None, reply=reply)


class SubmittedJob:
    """Made by `Producer.submit` and `Producer.job`. `is_duplicate`: the queue had this job already."""

    def __init__(
        self, producer: Producer, job_id: str, *, is_attached: bool = False, is_duplicate: bool = False
    ) -> None:
        self.id = job_id
        self.is_duplicate = is_duplicate
        self._producer = producer
        self._check_first = is_attached or is_duplicate
        self._reply: Reply | None = None
        self._away_since: float | None = None  # the queue could not be asked since then

    def __repr__(self) -> str:
        return f"SubmittedJob({self.id!r})"

    async def result(self, timeout: float | None = None) -> Reply:  # noqa: ASYNC109 - part of the documented call
        """Wait for the answer; raises the error it stands for unless it is ok.

        `ResultTimeout` when `timeout` seconds pass first: the job lives on and can be waited for again.
        `ResultExpired` and `UnknownJob` when there is nothing to wait for any more; `QueueUnreachable` when Redis stays
        away for half a minute.
        """
        return raise_for_status(await self.reply(timeout))

    async def reply(self, timeout: float | None = None) -> Reply:  # noqa: ASYNC109
        """`result`, but every answer is returned as it is, whatever its status."""
        try:
            async with asyncio.timeout(timeout):
                return await self._await_reply()
        except TimeoutError as error:
            alone = await alone_in_words(self._producer)
            message = f"no answer of {self.id} within {timeout} s"
            raise ResultTimeout(message if alone is None else f"{message}; {alone}") from error

    async def _await_reply(self) -> Reply:
        if self._reply is None:
            async for entry in self._entries():
                if entry.is_done:
                    self._reply = _decoded_reply(entry)
        if self._reply is None:
            raise UnknownJob(self.id)
        return self._reply

    async def stream(self) -> AsyncIterator[Delta | Restarted]:
        """The text as it comes; a job submitted without `stream=True` gives it in one piece at its end.

        After the last piece, an answer that is not ok is raised as `result` does.
        """
        merger = DeltaMerger()
        async for entry in self._entries():
            if entry.is_done:
                self._reply = _decoded_reply(entry)
                events = merger.end(self._reply)
            else:
                events = merger.add(_decoded_delta(entry))
            for event in events:
                yield event
        if self._reply is not None:
            raise_for_status(self._reply)

    async def _entries(self) -> AsyncIterator[ReplyEntry]:
        """All entries of the reply key up to and with the answer."""
        with self._producer.feed(self.id) as feed:
            index = 0
            while True:
                entry = await self._next_entry(feed, index)
                if entry is None:
                    continue
                yield entry
                if entry.is_done:
                    return
                index += 1

    async def _next_entry(self, feed: Feed, index: int) -> ReplyEntry | None:
        """None when nothing came for a while and the queue still knows the job."""
        if not self._check_first or index > 0:
            try:
                async with asyncio.timeout(CHECK_AFTER_S):
                    return await feed.entry_at(index)
            except TimeoutError:
                pass
        is_first, self._check_first = self._check_first, False
        status = await (self.status() if is_first else self._status_in_time())
        if status is None:
            return None
        if len(feed.entries) > index or status.has_reply:
            return None
        if status.state is JobState.DONE:
            raise ResultExpired(f"{self.id} was answered ({status.status}), its reply is no longer kept")
        if status.state is JobState.UNKNOWN:
            raise UnknownJob(f"this queue does not know {self.id}")
        return None

    async def _status_in_time(self) -> JobStatus | None:
        """None while an outage is waited out."""
        now = asyncio.get_running_loop().time()
        try:
            status = await self.status()
        except QueueUnreachable:
            if self._away_since is None:
                self._away_since = now
            if now - self._away_since >= OUTAGE_S:
                raise
            return None
        self._away_since = None
        return status

    async def status(self) -> JobStatus:
        return await self._producer.status(self.id)

    async def cancel(self) -> CancelOutcome:
        return await self._producer.cancel(self.id)


def _decoded_reply(entry: ReplyEntry) -> Reply:
    try:
        return decode_reply(entry.payload)
    except ValueError as error:
        raise ProtocolError(f"unreadable answer: {error}") from error


def _decoded_delta(entry: ReplyEntry) -> Delta:
    try:
        return decode_delta(entry.payload)
    except ValueError as error:
        raise ProtocolError(f"unreadable delta: {error}") from error
