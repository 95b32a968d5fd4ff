"""`EngineHandle` around an engine in a thread of this process.

The thread owns the engine: it applies commands in order between steps, steps as long as there are rows, and sleeps on
the command queue when there are none. Everything it has to say is put on the event loop's queue from outside the loop.

    event loop ── Add, Remove, Close ──▶ commands ──▶ thread: engine.add/remove, engine.step ── events ──▶ event loop

An exception of `step` loses the rows it was running, nothing else: they are removed, and the engine goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Hashable

from edgellm_worker.engine.api import (
    Engine,
    EngineEvent,
    EngineFailure,
    EngineLimits,
    EngineReady,
    EngineTraits,
    FinishReason,
    GenerationRequest,
    RowUpdate,
    StepReport,
)
from edgellm_worker.engine.errors import CapacityError, RequestError

log = logging.getLogger(__name__)

_Command = Callable[[], None]


class ThreadEngineHandle:
    """Takes over `engine`; make it inside the running event loop, end it with `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits, self._traits = engine.limits, engine.traits
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._row_ids: set[int] = set()  # the thread's own
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def traits(self) -> EngineTraits:
        return self._traits

    @property
    def is_ready(self) -> bool:
        return self._thread.is_alive()

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self._engine.compat_key(request)

    def validate(self, request: GenerationRequest) -> None:
        self._engine.validate(request)

    def add(self, row_id: int, request: GenerationRequest) -> None:
        self._commands.put(lambda: self._add(row_id, request))

    def remove(self, row_id: int) -> None:
        self._commands.put(lambda: self._remove(row_id))

    async def next_event(self) -> EngineEvent:
        return await self._events.get()

    async def close(self) -> None:
        """Waits for the step that is running; rows still there are dropped without an event."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._apply_commands():
                self._step()
        finally:
            self._engine.close()

    def _apply_commands(self) -> bool:
        """All commands that are there, or the next one when there are no rows; False when told to close."""
        while not self._commands.empty() or not self._row_ids:
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _step(self) -> None:
        try:
            report = self._engine.step()
        except Exception as error:
            log.exception("the engine's step failed")
            self._fail(f"{type(error).__name__}: {error}")
            return
        self._row_ids -= {update.row_id for update in report.updates if update.finish_reason is not None}
        self._post(report)

    def _fail(self, reason: str) -> None:
        lost = tuple(sorted(self._row_ids))
        for row_id in lost:
            self._remove(row_id)
        self._post(EngineFailure(lost, reason))
        self._post(EngineReady())

    def _add(self, row_id: int, request: GenerationRequest) -> None:
        try:
            self._engine.add(row_id, request)
        except (RequestError, CapacityError) as error:
            self._refuse(row_id, str(error))
        except Exception as error:
            log.exception("the engine could not add row %d", row_id)
            self._engine.remove(row_id)
            self._refuse(row_id, f"{type(error).__name__}: {error}")
        else:
            self._row_ids.add(row_id)

    def _refuse(self, row_id: int, reason: str) -> None:
        refused = RowUpdate(row_id, finish_reason=FinishReason.ERROR, error=reason)
        self._post(StepReport((refused,), len(self._row_ids), {}, 0, 0, 0))

    def _remove(self, row_id: int) -> None:
        self._engine.remove(row_id)
        self._row_ids.discard(row_id)

    def _post(self, event: EngineEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
