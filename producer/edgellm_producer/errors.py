"""The errors of the client.

EdgellmError
├── QueueFull        the queue holds `limit` jobs already; back off and submit again
├── JobRejected      the job itself is wrong: `code`, `field`; do not retry unchanged
├── JobFailed        the worker gave up on it: `code`; the caller may submit it again
├── JobExpired       its timeout passed before it finished; partial text in `reply`
├── JobCancelled     someone cancelled it; partial text in `reply`
├── ResultTimeout    the *wait* ran out; the job lives on, ask again
├── ResultExpired    it was answered, but the reply's time to live has passed
├── UnknownJob       no such job: never submitted to this queue, or forgotten
├── QueueUnreachable Redis does not answer, or refuses; nothing is known to have been lost, try again
└── ProtocolError    a message that this version cannot read
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm_producer.wire import Reply


class EdgellmError(Exception):
    """Base of every error this package raises."""


class QueueFull(EdgellmError):  # noqa: N818 - the names are the product's vocabulary
    """`accepted_ids`: what a bulk submit had got in before the bound, in order."""

    def __init__(self, length: int, limit: int, accepted_ids: tuple[str, ...] = ()) -> None:
        super().__init__(f"queue is full: {length} jobs, limit {limit}")
        self.length = length
        self.limit = limit
        self.accepted_ids = accepted_ids


class JobError(EdgellmError):
    """A job that ended without a usable result; `reply` is the whole answer where there is one."""

    def __init__(self, code: str, message: str, *, field: str | None = None, reply: Reply | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = code
        self.message = message
        self.field = field
        self.reply = reply


class JobRejected(JobError):  # noqa: N818
    """Refused for what it says; `field` names the offending field.

    `accepted_ids`: what a bulk submit had got in when it met this job, in order.
    """

    accepted_ids: tuple[str, ...] = ()


class JobFailed(JobError):  # noqa: N818
    """Given up after the allowed attempts, or lost to a fault of the worker's."""


class JobExpired(JobError):  # noqa: N818
    """Its `timeout_s` passed."""


class JobCancelled(JobError):  # noqa: N818
    """Cancelled on request."""


class ResultTimeout(EdgellmError, TimeoutError):  # noqa: N818
    """The wait ended before the job did."""


class ResultExpired(EdgellmError):  # noqa: N818
    """Answered, but the reply is no longer kept."""


class UnknownJob(EdgellmError):  # noqa: N818
    """Neither queued, nor running, nor answered here."""


class QueueUnreachable(EdgellmError, ConnectionError):  # noqa: N818
    """Redis cannot be reached or refuses; the library's own error is the cause."""


class ProtocolError(EdgellmError):
    """Bytes that are no message of a known version."""
