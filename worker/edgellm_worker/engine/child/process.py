"""The child's side: load the engine, then alternate between commands and steps until told to close.

Commands are read by a thread, so that a full pipe never blocks the parent while a step runs; they are applied between
steps. The child never outlives its parent: the kernel kills it when the parent dies, and end-of-file on the pipe ends
it too. It ignores SIGINT, SIGTERM and SIGHUP, which terminals and service managers send to the whole group: the parent
drains, then closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from edgellm_worker.engine.api import Engine, FinishReason, RowUpdate, StepReport
from edgellm_worker.engine.child.messages import (
    HEADER,
    Add,
    Close,
    Failed,
    Hello,
    Load,
    Logged,
    Message,
    Remove,
    Report,
    body_length,
    decode,
    encode,
)
from edgellm_worker.engine.errors import CapacityError, CheckpointError, EngineFault, RequestError

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJ = 500
_LOGGER = "edgellm_worker"

EngineLoader = Callable[[Load], Engine]


class Pipe:
    """Blocking frames over the socket inherited from the parent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._writing = threading.Lock()  # any thread may log

    def read(self) -> Message | None:
        """The next message, None at end of file."""
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        return decode(self._reader.read(body_length(header)))

    def write(self, message: Message) -> None:
        with self._writing:
            self._connection.sendall(encode(message))


class PipeLog(logging.Handler):
    """What is logged here is the parent's to write: in its format, to its level, and whole beside its own lines. Where
    nobody reads any more a line is lost.
    """

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._pipe.write(Logged(record.levelno, record.name, record.getMessage()))


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare_process() -> None:
    """Die with the parent, be the kernel's first choice when memory runs out, leave signals to the parent."""
    end_with_parent()
    with contextlib.suppress(OSError):  # a sandbox without /proc has no say in it
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJ))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def run(connection: socket.socket, load_engine: EngineLoader) -> int:
    """Serve one parent; exit code 0 after `Close` or end of file, 4 when the engine cannot be loaded or broke."""
    pipe = Pipe(connection)
    with _logging_to(pipe):
        return _run(pipe, load_engine)


@contextlib.contextmanager
def _logging_to(pipe: Pipe) -> Iterator[None]:
    logger, handler = logging.getLogger(_LOGGER), PipeLog(pipe)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _run(pipe: Pipe, load_engine: EngineLoader) -> int:
    load = pipe.read()
    if not isinstance(load, Load):
        return 0
    try:
        engine = load_engine(load)
        pipe.write(Hello(engine.limits, engine.traits))
        _serve(engine, pipe)
        engine.close()
    except EngineFault as error:
        problems = error.problems if isinstance(error, CheckpointError) else (str(error),)
        pipe.write(Failed(type(error).__name__, problems))
        return 4
    return 0


def _serve(engine: Engine, pipe: Pipe) -> None:
    commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(pipe, commands), daemon=True).start()
    while True:
        while not commands.empty() or engine.num_rows == 0:
            command = commands.get()
            if command is None or isinstance(command, Close):
                return
            _apply(engine, command, pipe)
        pipe.write(Report(engine.step()))


def _read_commands(pipe: Pipe, commands: queue.SimpleQueue[Message | None]) -> None:
    while (message := pipe.read()) is not None:
        commands.put(message)
    commands.put(None)


def _apply(engine: Engine, command: Message, pipe: Pipe) -> None:
    match command:
        case Add(row_id, request):
            try:
                engine.add(row_id, request)
            except (RequestError, CapacityError) as error:
                refused = RowUpdate(row_id, finish_reason=FinishReason.ERROR, error=str(error))
                pipe.write(Report(StepReport((refused,), engine.num_rows, {}, 0, 0, 0)))
        case Remove(row_id):
            engine.remove(row_id)
        case _:
            raise EngineFault(f"unexpected message {type(command).__name__}")
