"""The reader: asks Redis for exactly as many jobs as there is room for, and prepares what comes.

The blocked read is never cancelled, only woken (a cancelled read can lose what it just got). While Redis is away it
pauses longer and longer, up to ten seconds, and logs once per pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from edgellm_producer.wire import Reply
from edgellm_worker.jobs import Intake, PreparedJob, is_slow_to_prepare
from edgellm_worker.queue.api import Delivery, WorkerQueue
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.retry import backoff_s


class Reader:
    """`room` says how many jobs may be read now; `deliver` takes each, prepared or refused; `woken` is called whenever
    a wait ends, because what ended it may be a cancellation and not a job.
    """

    def __init__(
        self,
        queue: WorkerQueue,
        intake: Intake,
        *,
        block_s: float,
        room: Callable[[], int],
        deliver: Callable[[Delivery, PreparedJob | Reply], None],
        woken: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._intake = intake
        self._block_s = block_s
        self._room = room
        self._deliver = deliver
        self._woken = woken
        self._has_room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._log = structlog.get_logger("edgellm_worker.reader")

    def look_again(self) -> None:
        """There may be room now."""
        if self._room() > 0:
            self._has_room.set()

    def stop(self) -> None:
        """`run` returns soon; what was read by then is still delivered."""
        self._stopping.set()
        self._has_room.set()
        self._queue.wake()

    async def run(self) -> None:
        pauses = backoff_s()
        may_have_more = False
        while not self._stopping.is_set():
            if self._room() <= 0:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            try:
                if not may_have_more:
                    await self._queue.wait(self._block_s)
                    self._woken()
                room = self._room()
                deliveries = await self._queue.take(room) if room > 0 else []
            except QueueUnavailable as error:
                await self._pause(next(pauses), error)
                continue
            pauses = backoff_s()
            may_have_more = 0 < room == len(deliveries)
            # Jobs of one read are handed on together: else the first would start a batch of its own.
            is_slow = any(is_slow_to_prepare(delivery.job) for delivery in deliveries)
            prepared = await asyncio.to_thread(self._prepare, deliveries) if is_slow else self._prepare(deliveries)
            for delivery, outcome in zip(deliveries, prepared, strict=True):
                self._deliver(delivery, outcome)

    def _prepare(self, deliveries: list[Delivery]) -> list[PreparedJob | Reply]:
        return [self._intake.prepare(delivery) for delivery in deliveries]

    async def _pause(self, seconds: float, error: QueueUnavailable) -> None:
        self._log.warning("cannot read", error=str(error), again_in_s=seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
