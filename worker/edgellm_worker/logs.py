"""Logs: one event per line on standard error, as text or JSON; one event per job and per batch.

`log.info("job", each=[{...}, {...}])` is one event per entry, all of this moment, written in one go.

No prompt and no output text is ever logged. Whatever came from outside is quoted, so that a job cannot forge a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from select import PIPE_BUF
from types import NoneType
from typing import Any, Final, TextIO, cast

import structlog


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


_encode: Final = json.JSONEncoder(default=str).encode  # `json.dumps` with a default makes an encoder per call


@dataclass(frozen=True, slots=True)
class _Renderer:
    form: LogFormat

    def __call__(self, _logger: Any, level: str, event: MutableMapping[str, Any]) -> str:
        name, now = event.pop("event"), datetime.now(UTC).isoformat().replace("+00:00", "Z")
        entries = event.pop("each", [event])
        if self.form is LogFormat.JSON:
            return "\n".join([_encode({**e, "event": name, "level": level, "timestamp": now}) for e in entries])
        head = f"{now} {level:<7} {_quoted(name, spaces=True)}"
        return "\n".join([_as_text(head, entry) for entry in entries])


def _as_text(head: str, entry: Mapping[str, Any]) -> str:
    return " ".join([head, *[f"{key}={_SPELLED.get(type(value), _quoted)(value)}" for key, value in entry.items()]])


def _quoted(value: object, *, spaces: bool = False) -> str:
    """In quotes where it must be: a line has one event, and a value no spaces."""
    text = value if isinstance(value, str) else _encode(value)
    is_plain = text.isprintable() and '"' not in text and (spaces or " " not in text)
    return text if is_plain else _encode(text)


_SPELLED: Final[Mapping[type, Callable[[Any], str]]] = {
    int: repr,
    float: repr,
    bool: {True: "true", False: "false"}.__getitem__,
    NoneType: {None: "null"}.__getitem__,
}


class _StandardError:
    """Standard error as it is at the time of each write: a status line may have taken its place meanwhile. Where
    nothing can be written (a full disk, a terminal that was closed) lines are lost, never jobs.

    A pipe that several processes share takes PIPE_BUF bytes (4096) in one piece, and cuts what is longer: so lines go
    in groups below that. One line that is longer by itself goes as it is.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            for piece in _pieces(text):
                sys.stderr.write(piece)
        return len(text)

    def flush(self) -> None:
        """It ends every line by itself."""


def _pieces(text: str) -> Iterator[str]:
    """Whole lines, together at most PIPE_BUF bytes where they can be."""
    most = PIPE_BUF if text.isascii() else PIPE_BUF // 4
    start = 0
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end
    yield text[start:]


def configure_logs(form: LogFormat, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Called once, by the command line. `stream` defaults to standard error."""
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            _Renderer(form),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream or cast("TextIO", _StandardError())),
        cache_logger_on_first_use=True,
    )
    bridge = logging.getLogger("edgellm_worker")
    bridge.handlers = [_Bridge()]
    bridge.setLevel(level)
    bridge.propagate = False


class _Bridge(logging.Handler):
    """The engine package logs through the standard library, so that it depends on nothing; here it joins the rest."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), source=record.name)
