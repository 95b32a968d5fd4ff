"""`WorkerQueue` over Redis: one script per transition of the table in transitions.py.

Connections: a pool for scripts; one for the blocked read; one for the pub/sub hints; one, synchronous, in the lease
keeper's thread. None is shared, none survives a fork.

A script may have run although its reply was lost. FINISH, BEGIN, RELEASE and RETRY are harmless when repeated. TAKE is
not: its entries would stay parked under this worker's name, so after any failed take the next one also looks through
the worker's own pending entries for those it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence

from edgellm_producer.connect import connect_blocking
from edgellm_producer.keys import Priority
from edgellm_producer.wire import Delta, Job, Status, encode
from edgellm_worker.outcome import packed
from edgellm_worker.queue.api import Answer, BeginOutcome, Delivery, QueueCounters, QueueStats
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.errors import ModelMismatch, QueueUnavailable
from edgellm_worker.queue.events import EventListener
from edgellm_worker.queue.held import Entry, HeldTable, ReplyClock
from edgellm_worker.queue.lease import LeaseKeeper
from edgellm_worker.queue.link import Link, Waiter, link_options
from edgellm_worker.queue.preflight import inspect_server, told_apart
from edgellm_worker.queue.rows import (
    Newer,
    Row,
    Settlement,
    decode_row,
    deletion,
    ending,
    parse_row,
    parse_swept,
)

logger = logging.getLogger(__name__)

SWEEP_LIMIT = 200
NEWER_VERSION_DELAYS = 2
_BEGIN_OUTCOMES = {outcome.encode(): outcome for outcome in BeginOutcome}


def _entry(delivery: Delivery) -> Entry:
    return Entry(delivery.priority, delivery.entry_id, delivery.job.id)


def _flat(entries: Sequence[Entry]) -> list[str | bytes | int]:
    return [word for entry in entries for word in entry]


class RedisQueue:
    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._held = HeldTable()
        self._clock = ReplyClock()
        self._link = Link(config, self._clock)
        self._waiter = Waiter(config, self._clock)
        self._listener = EventListener(config, self._on_event)
        self._keeper = LeaseKeeper(
            config, self._held, self._clock, connect=self._connect_keeper, on_news=self._wake_from_thread
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._last_ids: list[str] = ["0-0"] * len(Priority)
        self._turn = 0
        self._must_recover = False
        self._is_drained = False  # the last take got all there was; the blocked read tells of anything since
        self._reclaimed_at = float("-inf")
        self._deltas: list[tuple[Delivery, Delta, asyncio.Future[bool]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._num_reclaimed = 0
        self._answered: Counter[str] = Counter()
        self._is_open = False

    @property
    def consumer(self) -> str:
        return self._config.consumer

    @property
    def last_reply_age_s(self) -> float:
        return self._clock.age_s

    @property
    def counters(self) -> QueueCounters:
        return QueueCounters(
            num_reclaimed=self._num_reclaimed,
            num_reconnects=self._link.num_reconnects,
            renewal_age_s=self._keeper.renewal_age_s,
            answered=dict(self._answered),
        )

    async def open(self) -> None:
        """Raises `ModelMismatch` beside a live worker of another model, `QueueMisconfigured` without the rights."""
        models = ",".join(self._config.served_models)
        with told_apart(self._config):
            await inspect_server(self._link, self._config)
            reply = await self._link.run("register", [self.consumer, self._config.liveness_ms, models])
        if reply[0] != b"ok":
            raise ModelMismatch(reply[1].decode(), reply[2].decode(), models)
        self._loop = asyncio.get_running_loop()
        self._keeper.start()
        self._listener.start()
        self._is_open = True

    # Reading

    async def take(self, count: int) -> list[Delivery]:
        if count <= 0:
            return []
        now = time.monotonic()
        reclaims = now - self._reclaimed_at >= self._config.reclaim_interval_s
        if self._is_drained and self._waiter.is_blocked and not (reclaims or self._must_recover):
            return []
        recovers, self._must_recover = self._must_recover, True  # until the reply is safely here
        args: list[str | bytes | int] = [
            self.consumer,
            count,
            self._config.lease_ms,
            round(self._config.ageing_s * 1000),
            self._turn,
            int(reclaims),
            int(recovers),
        ]
        if recovers:
            args += [word for entry in self._held.snapshot() for word in entry[:2]]
        now_text, raw_rows, last_ids, num_reclaimed = await self._link.run("take", args)
        self._must_recover = False
        self._turn = (self._turn + 1) % 6
        self._last_ids = [item.decode() for item in last_ids]
        self._is_drained = len(raw_rows) < count
        if self._is_drained:
            self._waiter.reading(self._last_ids)
        self._num_reclaimed += num_reclaimed
        if reclaims:
            self._reclaimed_at = now
        rows = [parse_row(raw) for raw in raw_rows]
        return await self._deliver([row for row in rows if (row.lane, row.entry_id) not in self._held], int(now_text))

    async def _deliver(self, rows: Sequence[Row], now_ms: int) -> list[Delivery]:
        """Turn rows into deliveries; what cannot be one is answered here. A failure to answer loses nothing: those
        entries are not in the table, so the next take finds them again.
        """
        deliveries: list[Delivery] = []
        settlements: list[Settlement] = []
        try:
            for row in rows:
                outcome = await self._outcome(row, now_ms)
                if isinstance(outcome, Delivery):
                    self._held.add(_entry(outcome))
                    deliveries.append(outcome)
                elif outcome is not None:
                    settlements.append(outcome)
            await self._refuse(settlements)
        except QueueUnavailable as error:
            logger.warning("taken entries are answered later: %s", error)
            self._must_recover = True
        return deliveries

    async def _outcome(self, row: Row, now_ms: int) -> Delivery | Settlement | None:
        decoded = decode_row(row, self.consumer)
        if isinstance(decoded, Newer):
            return await self._postpone(decoded)
        if isinstance(decoded, Settlement):
            return decoded
        row, job = decoded
        if not row.is_known:
            adopted = await self._adopt(row, job)
            if adopted is None:
                return None
            row = adopted
        if row.is_cancelled:
            return ending(row, Status.CANCELLED, now_ms, self.consumer)
        if row.deadline_ms is not None and row.deadline_ms <= now_ms:
            return ending(row, Status.EXPIRED, now_ms, self.consumer)
        return Delivery(
            job,
            row.lane,
            row.entry_id,
            row.attempt,
            row.enqueued_at_ms,
            row.deadline_ms,
            time.monotonic(),
            now_ms,
            row.runs_alone,
            row.solo_kills,
        )

    async def _adopt(self, row: Row, job: Job) -> Row | None:
        """Give a job that came by a bare XADD (or lost its hash) its record."""
        deadline = "" if job.timeout_s is None else row.enqueued_at_ms + round(job.timeout_s * 1000)
        record = (row.enqueued_at_ms, job.tenant or "", deadline, job.reply_ttl_s * 1000)
        raw = await self._link.run("adopt", [row.lane, row.entry_id, row.id, *record])
        return None if raw is None else parse_row(raw)

    async def _postpone(self, newer: Newer) -> Settlement | None:
        """A later version is delayed twice, for a newer worker to take; then it is given up."""
        row = newer.row
        if row.newer_seen >= NEWER_VERSION_DELAYS:
            return newer.refusal
        delay_ms = round(self._config.newer_version_delay_s * 1000)
        entry = Entry(row.lane, row.entry_id, row.id)
        await self._send_back(entry, delay_ms, "newer", row.envelope)
        return None

    async def _send_back(self, entry: Entry, delay_ms: int, counted: str, envelope: bytes) -> None:
        """To the delayed jobs, through no fault of the engine's; `counted` is a field of its record to count up."""
        await self._link.run("retry", [self.consumer, *entry, delay_ms, 0, 0, counted, envelope])

    async def wait(self, timeout_s: float) -> None:
        reading = self._waiter.reading(self._last_ids)
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait({reading, woken}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    # Running

    async def begin(self, deliveries: Sequence[Delivery]) -> list[BeginOutcome]:
        if not deliveries:
            return []
        entries = [_entry(delivery) for delivery in deliveries]
        limits: list[str | bytes | int] = [self.consumer, self._config.max_attempts, self._config.max_solo_kills]
        reply = await self._link.run("begin", limits + _flat(entries))
        outcomes = [_BEGIN_OUTCOMES[word] for word in reply]
        self._held.remove(e for e, outcome in zip(entries, outcomes, strict=True) if outcome is BeginOutcome.LOST)
        return outcomes

    async def append(self, delivery: Delivery, delta: Delta) -> bool:
        """Appends that meet in one turn of the loop travel in one command."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._deltas.append((delivery, delta, future))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        while self._deltas:
            batch, self._deltas = self._deltas, []
            args: list[str | bytes | int] = [self.consumer]
            for delivery, delta, _ in batch:
                args += [*_entry(delivery), delivery.job.reply_ttl_s * 1000, encode(delta)]
            try:
                written = await self._link.run("append", args)
            except QueueUnavailable as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(QueueUnavailable(str(error)))
            else:
                for (_, _, future), flag in zip(batch, written, strict=True):
                    if not future.done():
                        future.set_result(bool(flag))

    def forget(self, deliveries: Sequence[Delivery]) -> None:
        self._held.remove(_entry(delivery) for delivery in deliveries)

    def lost(self) -> set[str]:
        return self._held.drain_lost()

    def cancelled(self) -> set[str]:
        return self._held.drain_cancelled()

    # Ending

    async def finish(self, answers: Sequence[Answer]) -> list[bool]:
        visible = await self._settle([self._settlement(answer) for answer in answers])
        self._held.remove(_entry(answer.delivery) for answer in answers)
        return visible

    def _settlement(self, answer: Answer) -> Settlement:
        delivery, reply, dead_reason = answer
        ttl_s = delivery.job.reply_ttl_s
        return Settlement(
            delivery.priority,
            delivery.entry_id,
            delivery.job.id,
            reply.status,
            "",
            packed(reply, worker=self.consumer, reply_ttl_s=ttl_s),
            ttl_s * 1000,
            dead_reason or "",
            encode(delivery.job) if dead_reason else b"",
            reply.attempt,
        )

    async def _refuse(self, settlements: Sequence[Settlement]) -> None:
        """Answer what never becomes a delivery, and count it by its code."""
        visible = await self._settle(settlements)
        self._answered.update(s.code for s, was_first in zip(settlements, visible, strict=True) if was_first)

    async def _settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        if not settlements:
            return []
        args: list[str | bytes | int] = [self.consumer, self._config.max_dead_letters]
        for settlement in settlements:
            args += settlement.arguments(token=f"{self.consumer}:{settlement.attempts}:{settlement.entry_id}")
        return [bool(flag) for flag in await self._link.run("finish", args)]

    async def release(self, deliveries: Sequence[Delivery], *, begun: bool) -> None:
        if not deliveries:
            return
        entries = [_entry(delivery) for delivery in deliveries]
        _, without_entry = await self._link.run("release", [self.consumer, int(begun), *_flat(entries)])
        for delivery in deliveries:
            if delivery.id.encode() in without_entry:
                await self._send_back(_entry(delivery), 0, "", encode(delivery.job))
        self._held.remove(entries)

    async def retry(
        self,
        delivery: Delivery,
        *,
        delay_s: float,
        reason: str,
        solo_kill: bool = False,
    ) -> None:
        """The job runs alone from here on: whatever it met, its neighbours must not meet it too."""
        entry = _entry(delivery)
        logger.info("job %s is tried again in %.1f s: %s", delivery.id, delay_s, reason)
        flags = (round(delay_s * 1000), 1, int(solo_kill), "")
        await self._link.run("retry", [self.consumer, *entry, *flags, encode(delivery.job)])
        self._held.remove([entry])

    # Housekeeping

    async def sweep(self) -> None:
        held = self._held.snapshot()
        args: list[str | bytes | int] = [SWEEP_LIMIT, *(entry.job_id for entry in held)]
        now_text, expired, cancelled, _, deleted = await self._link.run("sweep", args)
        self._held.mark_cancelled(item.decode() for item in cancelled)
        settlements = [ending(parse_swept(raw), Status.EXPIRED, int(now_text), self.consumer) for raw in expired]
        for raw in deleted:
            row = parse_swept(raw)
            logger.error("job %s was deleted from the queue by somebody else: answered as failed", row.id)
            settlements.append(deletion(row, self.consumer))
        await self._refuse(settlements)

    async def stats(self) -> QueueStats:
        now_text, lanes, delayed, dead = await self._link.run("stats", [])
        now_ms = int(now_text)
        by_lane = dict(zip(Priority, lanes, strict=True))
        return QueueStats(
            length={lane: int(row[0]) for lane, row in by_lane.items()},
            oldest_s={lane: max(0.0, (now_ms - int(row[1] or now_ms)) / 1000) for lane, row in by_lane.items()},
            pending=sum(int(row[2]) for row in lanes),
            held=sum(int(row[3]) for row in lanes),
            delayed=int(delayed),
            dead=int(dead),
        )

    def _on_event(self, word: str, argument: str) -> None:
        if word == "cancel" and self._held.mark_cancelled([argument]):
            self.wake()
        elif word == "released":
            self._reclaimed_at = float("-inf")
            self.wake()

    def _wake_from_thread(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.wake)

    def _connect_keeper(self) -> object:
        timeout_s = min(self._config.command_timeout_s, max(1.0, self._config.lease_s / 3))
        options = link_options(self._config, timeout_s, max_connections=1)
        return connect_blocking(self._config.url, options)

    async def close(self) -> None:
        """The leases go last: until here a reply may still have been on its way. Entries still held are not handed
        back: `release` them first, or they come back when their lease ends. A worker that holds none is forgotten at
        once, and a worker of another model may follow it.
        """
        if self._flusher is not None:
            await self._flusher
        await self._listener.close()
        await self._waiter.close()
        if self._is_open:
            await asyncio.to_thread(self._keeper.stop)
            with contextlib.suppress(QueueUnavailable):
                await self._link.run("leave", [self.consumer])
        await self._link.close()
