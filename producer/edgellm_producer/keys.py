"""Every Redis key of a queue, in one place.

All keys of one queue share the hash tag ``{<queue>}``, so that every script and multi-key command stays on one Redis
Cluster slot. Ids and names are matched against strict patterns before they become part of a key.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ID_PATTERN: Final = r"^[A-Za-z0-9._-]{1,128}$"
NAME_PATTERN: Final = r"^[A-Za-z0-9._-]{1,64}$"
GROUP: Final = "workers"
JOB_FIELD: Final = b"job"
ID_FIELD: Final = b"id"
"""A stream entry is ``id`` (the job's id in clear, so that scripts need not decode) and ``job`` (the msgpack envelope).

An entry with ``job`` alone is accepted too: its id is then read from the envelope, its enqueue time from the entry id.
"""


class Priority(StrEnum):
    """The lanes, best first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one queue (see docs/protocol.md for what each holds)."""

    queue: str = "default"

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.queue):
            raise ValueError(f"queue: {self.queue!r} does not match {NAME_PATTERN}")

    @property
    def prefix(self) -> str:
        return f"edgellm:{{{self.queue}}}:"

    def lane(self, priority: Priority) -> str:
        return f"{self.prefix}jobs:{priority}"

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(self.lane(priority) for priority in Priority)

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{job_id}"

    def reply(self, job_id: str) -> str:
        return f"{self.prefix}reply:{job_id}"

    def done(self, job_id: str) -> str:
        return f"{self.prefix}done:{job_id}"

    def cancel(self, job_id: str) -> str:
        return f"{self.prefix}cancel:{job_id}"

    def dedup(self, idempotency_key: str) -> str:
        return f"{self.prefix}dedup:{idempotency_key}"

    def held(self, priority: Priority, tenant: str) -> str:
        return f"{self.prefix}held:{priority}:{tenant}"

    def tenants(self, priority: Priority) -> str:
        return f"{self.prefix}tenants:{priority}"

    def worker(self, name: str) -> str:
        return f"{self.prefix}worker:{name}"

    @property
    def delayed(self) -> str:
        return f"{self.prefix}delayed"

    @property
    def deadlines(self) -> str:
        return f"{self.prefix}deadlines"

    @property
    def checks(self) -> str:
        return f"{self.prefix}checks"

    @property
    def lease(self) -> str:
        return f"{self.prefix}lease"

    @property
    def dead(self) -> str:
        return f"{self.prefix}dead"

    @property
    def config(self) -> str:
        return f"{self.prefix}config"

    @property
    def events(self) -> str:
        return f"{self.prefix}events"


_VARIANT: Final = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def new_job_ids(count: int) -> list[str]:
    """UUIDv7 (RFC 9562 section 5.7): they sort by creation time, 74 random bits each."""
    time_digits = f"{time.time_ns() // 1_000_000:012x}"
    head = f"{time_digits[:8]}-{time_digits[8:]}-7"
    noise = secrets.token_hex(10 * count)  # 20 digits for an id, 19 of them used
    return [
        f"{head}{noise[i : i + 3]}-{_VARIANT[noise[i + 3]]}{noise[i + 4 : i + 7]}-{noise[i + 7 : i + 19]}"
        for i in range(0, 20 * count, 20)
    ]


def new_job_id() -> str:
    return new_job_ids(1)[0]
