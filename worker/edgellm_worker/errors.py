"""The worker's own errors, and how a command that ends with one exits.

WorkerError
└── ConfigError   the operator's: `problems` lists every one; nothing was started

The queue (queue/errors.py) and the engine (engine/errors.py) have their own trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from edgellm_worker.engine.errors import CapacityError, CheckpointError, DemandError, EngineFault
from edgellm_worker.queue.errors import ModelMismatch, QueueMisconfigured, QueueUnavailable


class WorkerError(Exception):
    """Base of what the worker raises outside its queue and its engine."""


class ConfigError(WorkerError):
    """`problems` holds one line per problem, each naming the flag, variable or key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ExitCode(IntEnum):
    DONE = 0
    OPERATOR = 2
    REDIS = 3
    ENGINE = 4
    HUNG_UP = 129  # 128 + SIGHUP: its terminal was closed; after a clean drain, as the two below
    INTERRUPTED = 130  # 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


_EXIT_CODES: Final[tuple[tuple[type[Exception], ExitCode], ...]] = (
    (ConfigError, ExitCode.OPERATOR),
    (ModelMismatch, ExitCode.OPERATOR),
    (QueueMisconfigured, ExitCode.OPERATOR),
    (QueueUnavailable, ExitCode.REDIS),
    (CheckpointError, ExitCode.OPERATOR),
    (CapacityError, ExitCode.OPERATOR),
    (DemandError, ExitCode.OPERATOR),
    (EngineFault, ExitCode.ENGINE),
)


def exit_code(error: Exception) -> ExitCode | None:
    """None for what is nobody's fault but a bug's."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), None)
