"""Builder processes: one at a time for what they build, and what is said of one that failed."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from edgellm_worker.engine.errors import BuildError

_NUM_LOG_LINES: Final = 15

_log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Over all processes of this machine. The lock goes with its process, so a killed builder blocks nobody."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process is building the same: waiting for it (%s)", path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:])


def builder_failure(builder: str, code: int, log: Path) -> BuildError:
    """`code` as `subprocess` gives it: below 0 for a signal."""
    how = f"was killed by signal {-code}" if code < 0 else f"exited {code}"
    return BuildError(f"{builder} {how}; its log is {log}\n{log_tail(log)}")
