"""Submit LLM generation jobs to an edgellm queue and read their replies."""

from edgellm_producer.errors import (
    EdgellmError,
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobRejected,
    ProtocolError,
    QueueFull,
    ResultExpired,
    ResultTimeout,
    UnknownJob,
)
from edgellm_producer.keys import Priority
from edgellm_producer.wire import Delta, Job, Reply, Status

__all__ = [
    "Delta",
    "EdgellmError",
    "Job",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobRejected",
    "Priority",
    "ProtocolError",
    "QueueFull",
    "Reply",
    "ResultExpired",
    "ResultTimeout",
    "Status",
    "UnknownJob",
]
