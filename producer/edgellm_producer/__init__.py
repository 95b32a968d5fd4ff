"""Submit LLM generation jobs to an edgellm queue and read their replies.

    async with Producer("redis://localhost") as producer:
        job = await producer.submit("def fibonacci(n):", max_tokens=64, stream=True)
        async for delta in job.stream():
            print(delta.text, end="")
        result = await job.result(timeout=30)

Redis itself is imported by the first connection, not by this package.
"""

from edgellm_producer.blocking import BlockingJob, BlockingProducer
from edgellm_producer.client import MapOutcome, Producer
from edgellm_producer.errors import (
    EdgellmError,
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobRejected,
    ProtocolError,
    QueueFull,
    QueueUnreachable,
    ResultExpired,
    ResultTimeout,
    UnknownJob,
)
from edgellm_producer.job import CancelOutcome, JobState, JobStatus, SubmittedJob
from edgellm_producer.keys import Priority
from edgellm_producer.streaming import Restarted
from edgellm_producer.wire import Delta, Job, Reply, Status

__all__ = [
    "BlockingJob",
    "BlockingProducer",
    "CancelOutcome",
    "Delta",
    "EdgellmError",
    "Job",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobRejected",
    "JobState",
    "JobStatus",
    "MapOutcome",
    "Priority",
    "Producer",
    "ProtocolError",
    "QueueFull",
    "QueueUnreachable",
    "Reply",
    "Restarted",
    "ResultExpired",
    "ResultTimeout",
    "Status",
    "SubmittedJob",
    "UnknownJob",
]
