"""The errors of the queue package.

QueueError
├── QueueUnavailable   Redis cannot be reached, or refuses for now (loading, read-only, out of memory); keep what you
│                      hold and try again
├── QueueMisconfigured this worker cannot work here until an operator acts: a server too old, missing rights
└── ModelMismatch      another live worker of this queue serves other models; the operator's to mend
"""

from __future__ import annotations


class QueueError(Exception):
    """Base of everything the queue package raises."""


class QueueUnavailable(QueueError):  # noqa: N818 - the vocabulary of the product
    pass


class QueueMisconfigured(QueueError):  # noqa: N818
    pass


class ModelMismatch(QueueError):  # noqa: N818
    def __init__(self, worker: str, theirs: str, ours: str) -> None:
        super().__init__(f"worker {worker} serves {theirs} on this queue, this one serves {ours}: one model per queue")
        self.worker = worker
