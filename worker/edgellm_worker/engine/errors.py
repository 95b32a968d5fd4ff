"""The errors of the engine package.

EngineFault
├── CheckpointError   the files are wrong: `problems` lists every one; the operator's to mend
├── DemandError       an engine was asked for what it cannot do; the operator's to mend
├── BuildError        a network or bundle cannot be built; the operator's or the library's
│   └── NetworkRefused    the library said that it cannot compile a network; in other types it may
├── CapacityError     limits that contradict each other or do not fit the device; no free slot
├── RequestError      this request can never run here: `field`; the producer's to mend
├── RowError          one row's numbers went bad; that row fails, its neighbours run on
└── EngineError       the engine broke while running; its rows may be tried again
"""

from __future__ import annotations

from collections.abc import Sequence


class EngineFault(Exception):  # noqa: N818 - the family name; leaves end in Error
    """Base of everything the engine package raises."""


class CheckpointError(EngineFault):
    """`problems` holds one line per problem, each naming file and tensor."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class DemandError(EngineFault):
    pass


class BuildError(EngineFault):
    pass


class NetworkRefused(BuildError):  # noqa: N818 - what happened, as ModelMismatch
    pass


class CapacityError(EngineFault):
    pass


class RequestError(EngineFault):
    def __init__(self, field: str, message: str, *, code: str = "invalid_field") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code


class RowError(EngineFault):
    pass


class EngineError(EngineFault):
    pass
