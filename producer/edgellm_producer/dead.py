"""Dead letters: jobs that were given up, kept with the reason for somebody to look at.

Each was answered when it was given up; trying it again makes a new job, with a new id.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgellm_producer.client import Producer
from edgellm_producer.errors import EdgellmError, ProtocolError
from edgellm_producer.job import SubmittedJob
from edgellm_producer.wire import unpack

PAGE: Final = 100
_ENTRY_ID: Final = re.compile(r"\d{1,20}-\d{1,20}")  # Redis reads 5 as 5-0 in one place and as a range in another


class UnknownDeadLetter(EdgellmError):  # noqa: N818 - as its siblings in errors.py
    """No such entry: dropped, tried again, or never there."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`entry_id` names it for the other calls; `id` is the job's, empty where none could be read."""

    entry_id: str
    id: str
    reason: str
    lane: str
    attempts: int
    consumer: str
    at_ms: int
    envelope: bytes

    def job_fields(self) -> dict[str, Any]:
        """The job as it was sent; `ProtocolError` when it never could be read, or is gone."""
        if not self.envelope:
            raise ProtocolError(f"the text of {self.id} went with its entry, which somebody deleted ({self.reason})")
        return unpack(self.envelope)


def _parsed(entry_id: bytes, flat: Sequence[bytes]) -> DeadLetter:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    return DeadLetter(
        entry_id=entry_id.decode(),
        id=text(b"id"),
        reason=text(b"reason"),
        lane=text(b"lane"),
        attempts=int(text(b"attempts") or 0),
        consumer=text(b"consumer"),
        at_ms=int(text(b"at") or 0),
        envelope=fields.get(b"job", b""),
    )


class DeadLetters:
    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._key = producer.keys.dead

    async def __aiter__(self) -> AsyncIterator[DeadLetter]:
        """Oldest first, read in pages."""
        start = "-"
        while True:
            page = await self._producer.call("XRANGE", self._key, start, "+", "COUNT", PAGE)
            for entry_id, fields in page:
                yield _parsed(entry_id, fields)
            if len(page) < PAGE:
                return
            start = "(" + page[-1][0].decode()

    async def get(self, entry_id: str) -> DeadLetter:
        """Raises `UnknownDeadLetter`."""
        is_id = _ENTRY_ID.fullmatch(entry_id) is not None
        page = await self._producer.call("XRANGE", self._key, entry_id, entry_id) if is_id else ()
        if not page:
            raise UnknownDeadLetter(f"no dead letter {entry_id}")
        return _parsed(*page[0])

    async def retry(self, entry_id: str) -> SubmittedJob:
        """Submit it again. Its new id follows from the entry, so a call that is repeated makes no second job."""
        letter = await self.get(entry_id)
        if not letter.id:
            raise ProtocolError(f"dead letter {entry_id} holds no job that could be read")
        fields = letter.job_fields()
        fields["id"] = f"{letter.id[:90]}.again-{entry_id}"
        fields.pop("idempotency_key", None)
        job = await self._producer.submit(**fields)
        await self.drop(entry_id)
        return job

    async def drop(self, entry_id: str) -> None:
        """Raises `UnknownDeadLetter`."""
        if not _ENTRY_ID.fullmatch(entry_id) or not await self._producer.call("XDEL", self._key, entry_id):
            raise UnknownDeadLetter(f"no dead letter {entry_id}")
