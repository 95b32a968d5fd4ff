"""The errors of the worker, outside its engine.

WorkerError
├── ConfigError        the operator's: `problems` lists every one; nothing was started
├── ModelConflict      the operator's: a live queue serves other model names than these
└── QueueUnavailable   Redis cannot be reached or refuses; keep what you have and try again

The engine has its own tree (engine/errors.py). `EXIT_CODES` says how a command that ends with one of either exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from edgellm_worker.engine.errors import CapacityError, CheckpointError, EngineFault


class WorkerError(Exception):
    """Base of everything the worker raises outside its engine."""


class ConfigError(WorkerError):
    """`problems` holds one line per problem, each naming the flag, variable or key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ModelConflict(WorkerError):  # noqa: N818 - reads as what it is
    """The served names of this worker differ from those that the live workers of the queue registered."""

    def __init__(self, ours: Sequence[str], registered: Sequence[str]) -> None:
        super().__init__(
            f"this worker would serve {', '.join(ours)}, but live workers of this queue serve {', '.join(registered)}; "
            "use another --queue, or --served-model-name"
        )
        self.ours = tuple(ours)
        self.registered = tuple(registered)


class QueueUnavailable(WorkerError):  # noqa: N818 - reads as what it is
    """Nothing is known about whether the command that failed took effect: every command is safe to repeat."""


class ExitCode(IntEnum):
    DONE = 0
    OPERATOR = 2
    REDIS = 3
    ENGINE = 4
    INTERRUPTED = 130  # 128 + SIGINT, after a clean drain
    TERMINATED = 143  # 128 + SIGTERM, after a clean drain


EXIT_CODES: Final[tuple[tuple[type[Exception], ExitCode], ...]] = (
    (ConfigError, ExitCode.OPERATOR),
    (ModelConflict, ExitCode.OPERATOR),
    (CheckpointError, ExitCode.OPERATOR),
    (CapacityError, ExitCode.OPERATOR),
    (QueueUnavailable, ExitCode.REDIS),
    (EngineFault, ExitCode.ENGINE),
)


def exit_code(error: Exception) -> ExitCode | None:
    """How a command that ends with this error exits; None for what is nobody's but a bug."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), None)
