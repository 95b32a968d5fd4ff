"""The worker's scripts, one per transition that a worker makes."""

from __future__ import annotations

from functools import cache
from typing import Final

from edgellm_producer.scripts import Script, compose, read_lua

PACKAGE: Final = "edgellm_worker.queue"
NAMES: Final = (
    "adopt",
    "append",
    "begin",
    "finish",
    "leave",
    "probe",
    "register",
    "release",
    "renew",
    "retry",
    "stats",
    "sweep",
    "take",
)


@cache
def script(name: str) -> Script:
    return compose(name, read_lua(PACKAGE, "entries"), read_lua(PACKAGE, name))
