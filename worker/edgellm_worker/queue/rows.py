"""Rows of the take script into deliveries, or into the answer that an entry gets without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from edgellm_producer.errors import JobRejected, ProtocolError
from edgellm_producer.keys import ID_PATTERN, Priority
from edgellm_producer.wire import (
    DEFAULT_REPLY_TTL_S,
    VERSION,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Job,
    Reply,
    Status,
    Timings,
    encode,
    job_from,
    unpack,
)


class Row(NamedTuple):
    """One entry as the script returns it. `deadline_ms` None: no timeout. `is_known`: its job:<id> exists.
    `newer_seen`: how often it was delayed because it speaks a later version.
    """

    lane: Priority
    entry_id: str
    id: str
    envelope: bytes
    enqueued_at_ms: int
    attempt: int
    solo_kills: int
    runs_alone: bool
    deadline_ms: int | None
    reply_ttl_ms: int
    is_cancelled: bool
    is_known: bool
    newer_seen: int


_LANES: Final = {lane.encode(): lane for lane in Priority}


def parse_row(raw: Sequence[Any]) -> Row:
    lane, entry, job_id, envelope, enqueued, attempt, kills, alone, deadline, ttl, cancelled, known, newer = raw
    return Row(
        _LANES[lane],
        entry.decode(),
        job_id.decode("utf-8", "replace"),
        envelope,
        int(enqueued),
        max(0, int(attempt)),
        int(kills),
        alone == b"1",
        int(deadline) if deadline else None,
        int(ttl) if ttl else DEFAULT_REPLY_TTL_S * 1000,
        bool(cancelled),
        bool(known),
        int(newer),
    )


def parse_swept(raw: Sequence[Any]) -> Row:
    """A job that the sweep found: it has a record but nobody read its entry."""
    job_id, lane, entry, ttl, enqueued, attempt = raw
    return parse_row([lane, entry, job_id, b"", enqueued, attempt, b"0", b"", b"", ttl, 0, 1, b"0"])


class Settlement(NamedTuple):
    """One answer as the finish script takes it. An empty `job_id` has no reply: the entry becomes a dead letter
    only. `code` is counted, not sent: the reply holds it already.
    """

    lane: str
    entry_id: str
    job_id: str
    status: Status
    code: str
    reply: bytes
    reply_ttl_ms: int = DEFAULT_REPLY_TTL_S * 1000
    dead_reason: str = ""
    envelope: bytes = b""
    attempts: int = 0

    def arguments(self, token: str) -> list[str | bytes | int]:
        return [
            self.lane,
            self.entry_id,
            self.job_id,
            self.status,
            token,
            self.reply_ttl_ms,
            self.reply,
            self.dead_reason,
            self.envelope,
            self.attempts,
        ]


@dataclass(frozen=True, slots=True)
class Newer:
    """The entry speaks a later version: another worker may know it, so it waits before it is given up."""

    row: Row
    refusal: Settlement


ENDINGS: Final = {
    Status.CANCELLED: (ErrorCode.CANCELLED, "cancelled before it ran", FinishReason.CANCELLED),
    Status.EXPIRED: (ErrorCode.TIMEOUT, "its timeout passed before it ran", None),
}


def ending(row: Row, status: Status, now_ms: int, worker: str) -> Settlement:
    """The answer of a job that was cancelled or expired without running."""
    code, message, finish_reason = ENDINGS[status]
    waited_ms = float(max(0, now_ms - row.enqueued_at_ms))
    reply = Reply(
        id=row.id,
        status=status,
        finish_reason=finish_reason,
        error=ErrorInfo(code=code, message=message),
        timings=Timings(queue_ms=waited_ms, total_ms=waited_ms),
        attempt=row.attempt,
        worker=worker,
        reply_ttl_s=row.reply_ttl_ms // 1000,
    )
    return Settlement(row.lane, row.entry_id, row.id, status, code, encode(reply), row.reply_ttl_ms)


def refusal(row: Row, status: Status, error: ErrorInfo, worker: str, dead_reason: str = "") -> Settlement:
    reply = Reply(
        id=row.id,
        status=status,
        finish_reason=FinishReason.ERROR,
        error=error,
        attempt=row.attempt,
        worker=worker,
        reply_ttl_s=row.reply_ttl_ms // 1000,
    )
    return Settlement(
        row.lane,
        row.entry_id,
        row.id,
        status,
        error.code,
        encode(reply),
        row.reply_ttl_ms,
        dead_reason,
        row.envelope if dead_reason else b"",
        row.attempt,
    )


def deletion(row: Row, worker: str) -> Settlement:
    """The answer of a job whose entry somebody deleted. Its dead letter has no envelope: that went with the entry."""
    info = ErrorInfo(code=ErrorCode.ENTRY_DELETED, message="somebody else deleted it from the queue in Redis")
    return refusal(row, Status.FAILED, info, worker, dead_reason=ErrorCode.ENTRY_DELETED)


_is_id: Final = re.compile(ID_PATTERN).fullmatch


def _readable_id(row: Row, fields: dict[str, Any]) -> str:
    """The entry's id, else the envelope's, else nothing; what does not match the pattern never becomes a key."""
    for candidate in (row.id, fields.get("id")):
        if isinstance(candidate, str) and _is_id(candidate):
            return candidate
    return ""


def decode_row(row: Row, worker: str) -> tuple[Row, Job] | Settlement | Newer:
    """Undecodable: a dead letter and, where an id can be read, a failed reply. Invalid: a rejected reply."""
    try:
        fields = unpack(row.envelope)
    except ProtocolError as error:
        row = _with_id(row, _readable_id(row, {}))
        info = ErrorInfo(code=ErrorCode.MALFORMED, message=str(error), field="job")
        return refusal(row, Status.FAILED, info, worker, dead_reason=ErrorCode.MALFORMED)
    row = _with_id(row, _readable_id(row, fields))
    if not row.id:
        info = ErrorInfo(code=ErrorCode.MALFORMED, message="no id", field="id")
        return refusal(row, Status.FAILED, info, worker, dead_reason=ErrorCode.MALFORMED)
    return _validated(row, fields, worker)


def _validated(row: Row, fields: dict[str, Any], worker: str) -> tuple[Row, Job] | Settlement | Newer:
    try:
        job = job_from(fields)
    except JobRejected as error:
        info = ErrorInfo(code=error.code, message=error.message, field=error.field)
        version = fields.get("v")
        if isinstance(version, int) and version > VERSION:
            return Newer(row, refusal(row, Status.FAILED, info, worker, dead_reason=ErrorCode.UNSUPPORTED_VERSION))
        return refusal(row, Status.REJECTED, info, worker)
    if job.id != row.id:
        info = ErrorInfo(code=ErrorCode.INVALID_FIELD, message=f"not the entry's own id {row.id}", field="id")
        return refusal(row, Status.REJECTED, info, worker)
    if (unbuilt := job.unbuilt_field()) is not None:
        info = ErrorInfo(code=ErrorCode.UNSUPPORTED_FIELD, message="not supported by this version", field=unbuilt)
        return refusal(row, Status.REJECTED, info, worker)
    return row, job


def _with_id(row: Row, job_id: str) -> Row:
    return row if row.id == job_id else row._replace(id=job_id)
