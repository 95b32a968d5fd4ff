"""`EngineHandle` around an engine in a process of its own.

Why a process: a native engine call can hang, leak, run out of memory or crash, and nothing inside the same process can
survive that. The parent keeps the jobs, the leases and the metrics; the child holds the device.

    spawn ─▶ Load ─▶ Hello ─▶ (Add | Remove ─▶ Report)* ─▶ Close ─▶ exit 0
                                   │ death, garbage, or no progress within the watchdog's allowance
                                   ▼
                     kill ─▶ EngineFailure(rows lost) ─▶ back-off ─▶ spawn ─▶ EngineReady

The child is spawned, never forked: a fork would copy locks held by other threads and the CUDA context. When its
resident memory passes the soft limit it takes no new rows, finishes those it has and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from edgellm_worker.engine.api import (
    EngineEvent,
    EngineFailure,
    EngineLimits,
    EngineReady,
    EngineTraits,
    GenerationRequest,
    StepReport,
)
from edgellm_worker.engine.child.messages import (
    HEADER,
    Add,
    Close,
    Failed,
    FrameError,
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
from edgellm_worker.engine.child.watchdog import Watchdog, WatchdogLimits
from edgellm_worker.engine.errors import (
    BuildError,
    CapacityError,
    CheckpointError,
    DemandError,
    EngineError,
    EngineFault,
)

log = logging.getLogger(__name__)

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CLOSE_GRACE_S: Final = 10.0
_EXIT_GRACE_S: Final = 5.0


class RequestRules(Protocol):
    """The parent's copy of what the engine says of a request (`Engine.validate`, `Engine.compat_key`)."""

    def validate(self, request: GenerationRequest) -> None: ...

    def compat_key(self, request: GenerationRequest) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class ChildOptions:
    """`command` is the child's argv; the descriptor of its pipe is appended."""

    load: Load
    rules: Callable[[EngineLimits], RequestRules]
    command: tuple[str, ...] = (sys.executable, "-m", "edgellm_worker.engine.child")
    watchdog: WatchdogLimits = field(default_factory=WatchdogLimits)
    soft_rss_bytes: int | None = None
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class _End:
    """How one child's life ended."""

    reason: str
    hung: bool = False
    planned: bool = False


class ChildEngineHandle:
    """Use as ``handle = await ChildEngineHandle.start(options)``; raises what loading raised in the child."""

    def __init__(self, options: ChildOptions) -> None:
        self._options = options
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._watchdog = Watchdog(options.watchdog)
        self._rows: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._is_running = False
        self._is_recycling = False
        self._closing = asyncio.Event()
        self._wake = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, options: ChildOptions) -> ChildEngineHandle:
        handle = cls(options)
        handle._supervisor = asyncio.create_task(handle._supervise(), name="engine-child")
        hello = await handle._hello
        handle._rules = options.rules(hello.limits)
        return handle

    _rules: RequestRules

    @property
    def limits(self) -> EngineLimits:
        return self._hello.result().limits

    @property
    def traits(self) -> EngineTraits:
        return self._hello.result().traits

    @property
    def is_ready(self) -> bool:
        return self._is_running and not self._is_recycling

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self._rules.compat_key(request)

    def validate(self, request: GenerationRequest) -> None:
        self._rules.validate(request)

    def add(self, row_id: int, request: GenerationRequest) -> None:
        if not self._is_running:
            self._events.put_nowait(EngineFailure((row_id,), "the engine is not running"))
            return
        self._rows.add(row_id)
        self._watchdog.row_added(time.monotonic(), len(request.prompt_token_ids))
        self._wake.set()
        self._send(Add(row_id, request))

    def remove(self, row_id: int) -> None:
        if row_id in self._rows:
            self._rows.discard(row_id)
            if not self._rows:
                self._watchdog.disarm()
            self._send(Remove(row_id))

    async def next_event(self) -> EngineEvent:
        return await self._events.get()

    async def close(self) -> None:
        self._closing.set()
        if self._is_running:
            self._send(Close())
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _CLOSE_GRACE_S if self._is_running else 0)
        self._kill()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def _send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _supervise(self) -> None:
        failures = 0
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                end = await self._one_life()
            except EngineFault as fault:
                if not self._hello.done():
                    self._hello.set_exception(fault)
                    return
                end = _End(f"{type(fault).__name__}: {fault}")
            self._is_running = self._is_recycling = False
            self._watchdog.disarm()
            if self._closing.is_set():
                return
            lost, self._rows = tuple(sorted(self._rows)), set()
            log.warning("engine process ended: %s", end.reason)
            self._events.put_nowait(EngineFailure(lost, end.reason, end.hung))
            # A planned end, or a life longer than the longest pause, wipes the slate.
            failures = 0 if end.planned or time.monotonic() - started > self._options.backoff_s[-1] else failures + 1
            if failures:
                await asyncio.sleep(self._options.backoff_s[min(failures, len(self._options.backoff_s)) - 1])

    async def _one_life(self) -> _End:
        """Spawn, load, relay reports until the child ends. Loading errors are raised, everything else is returned."""
        reader = await self._spawn()
        try:
            hello = await self._load(reader)
            self._is_running = True
            if self._hello.done():
                self._events.put_nowait(EngineReady(hello.memory_bytes))
            else:
                self._hello.set_result(hello)
            return await self._relay(reader)
        except FrameError as error:
            return _End(f"garbage on the engine's pipe: {error}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return _End(await self._exit_reason())
        finally:
            self._is_running = False
            self._kill()
            if self._process is not None:
                await self._process.wait()
            if self._writer is not None:
                self._writer.close()

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._options.command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        return reader

    async def _load(self, reader: asyncio.StreamReader) -> Hello:
        self._send(self._options.load)
        try:
            message = await asyncio.wait_for(_read_past_log(reader), self._options.watchdog.load_s)
        except TimeoutError:
            raise EngineError(
                f"not loaded within {self._options.watchdog.load_s:g} s: `edgellm-worker build` builds ahead of time"
                " and without a limit, --load-timeout-s sets another"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineError(f"while loading: {await self._exit_reason()}") from None
        if isinstance(message, Failed):
            raise _raised_in_child(message)
        if not isinstance(message, Hello):
            raise EngineError(f"expected Hello, got {type(message).__name__}")
        return message

    async def _relay(self, reader: asyncio.StreamReader) -> _End:
        """One read is pending at any time: it is never cancelled in the middle of a frame."""
        pending = asyncio.ensure_future(_read(reader))
        try:
            while True:
                if not await self._wait_for(pending):
                    return _End(self._hang_reason(), hung=True)
                if not pending.done():
                    continue
                message, pending = pending.result(), asyncio.ensure_future(_read(reader))
                if isinstance(message, Logged):
                    _write_logged(message)
                    continue
                if isinstance(message, Failed):
                    return _End(f"{message.error}: {'; '.join(message.problems)}")
                if not isinstance(message, Report):
                    raise FrameError(f"unexpected {type(message).__name__}")
                self._take_report(message.report)
                if self._is_recycling and not self._rows:
                    return _End("recycled: resident memory over the soft limit", planned=True)
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    async def _wait_for(self, pending: asyncio.Future[Message]) -> bool:
        """Until the read is done or a row was added; False when the watchdog's deadline passed first."""
        self._wake.clear()
        deadline = self._watchdog.deadline
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        woken = asyncio.ensure_future(self._wake.wait())
        waiting: set[asyncio.Future[Any]] = {pending, woken}
        try:
            done, _ = await asyncio.wait(waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        return bool(done) or self._watchdog.deadline is None or time.monotonic() < self._watchdog.deadline

    def _take_report(self, report: StepReport) -> None:
        self._rows -= {update.row_id for update in report.updates if update.finish_reason is not None}
        self._watchdog.step_done(
            time.monotonic(),
            num_rows=len(self._rows),
            num_prefill_tokens=report.num_prefill_tokens,
            num_tokens=sum(len(update.token_ids) for update in report.updates),
        )
        self._events.put_nowait(report)
        limit = self._options.soft_rss_bytes
        if limit is not None and not self._is_recycling and self.rss_bytes() > limit:
            log.warning(
                "engine process over its soft memory limit of %d bytes: recycling when its rows are done", limit
            )
            self._is_recycling = True

    def rss_bytes(self) -> int:
        """Resident memory of the child, 0 when it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def _hang_reason(self) -> str:
        return f"no progress within the watchdog's allowance with {len(self._rows)} rows"

    async def _exit_reason(self) -> str:
        try:
            code = await asyncio.wait_for(self._process.wait(), _EXIT_GRACE_S) if self._process else 0
        except TimeoutError:
            return "closed its pipe without exiting"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = ", probably by the kernel for lack of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"


async def _read(reader: asyncio.StreamReader) -> Message:
    header = await reader.readexactly(HEADER.size)
    return decode(await reader.readexactly(body_length(header)))


async def _read_past_log(reader: asyncio.StreamReader) -> Message:
    """The next message that is no log line."""
    while isinstance(message := await _read(reader), Logged):
        _write_logged(message)
    return message


def _write_logged(line: Logged) -> None:
    logging.getLogger(line.name).log(line.level, "%s", line.text)


def _raised_in_child(message: Failed) -> EngineFault:
    if message.error == CheckpointError.__name__:
        return CheckpointError(message.problems)
    kinds = {kind.__name__: kind for kind in (BuildError, CapacityError, DemandError)}
    return kinds.get(message.error, EngineError)("; ".join(message.problems))
