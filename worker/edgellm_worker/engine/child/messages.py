"""What crosses the pipe between the worker and its engine process.

A frame is ``EDG1``, the body's length as an unsigned 32-bit little-endian number, and the body: a msgpack pair of the
message's tag and its fields. There is no pickle: a child that was taken over by hostile input, or that prints on the
wrong descriptor, can at worst produce a `FrameError`, never an object of its own choosing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
from pydantic import TypeAdapter, ValidationError

from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, StepReport
from edgellm_worker.engine.load import EngineOptions

MAGIC: Final = b"EDG1"
HEADER: Final = struct.Struct("<4sI")
MAX_BODY_BYTES: Final = 256 << 20


class FrameError(Exception):
    """Bytes on the pipe that are no frame of this protocol."""


@dataclass(frozen=True, slots=True)
class Load:
    """First message to a child: what `load_engine` takes. `model` is the checkpoint's folder."""

    kind: str
    model: str
    options: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class Add:
    row_id: int
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Remove:
    row_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """Finish the current step, free everything, exit 0."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The engine is loaded."""

    limits: EngineLimits
    traits: EngineTraits
    memory_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    report: StepReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine raised; the child exits after this. `error` is the class name, `problems` one line each."""

    error: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Logged:
    """A line of the child's log, for the parent to write with its own. `level` and `name` are those of `logging`."""

    level: int
    name: str
    text: str


Message = Load | Add | Remove | Close | Hello | Report | Failed | Logged
_ADAPTERS: Final[dict[str, TypeAdapter[Any]]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Load, Add, Remove, Close, Hello, Report, Failed, Logged)
}


def encode(message: Message) -> bytes:
    tag = type(message).__name__
    body: bytes = msgpack.packb((tag, _ADAPTERS[tag].dump_python(message, mode="json")))
    return HEADER.pack(MAGIC, len(body)) + body


def body_length(header: bytes) -> int:
    magic, length = HEADER.unpack(header)
    if magic != MAGIC or length > MAX_BODY_BYTES:
        raise FrameError(f"not a frame header: {header!r}")
    return int(length)


def decode(body: bytes) -> Message:
    try:
        tag, fields = msgpack.unpackb(body)
        message: Message = _ADAPTERS[tag].validate_python(fields)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, ValidationError) as error:
        raise FrameError(f"not a message: {type(error).__name__}") from error
    return message
