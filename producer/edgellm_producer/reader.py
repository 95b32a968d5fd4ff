"""One blocked read for all the replies that a producer waits for.

A reply key is a small stream that nobody consumes: its readers keep a position and lose nothing, whatever happens to
their connections. All of them share one XREAD on a connection of its own. A key that is added while the read is blocked
interrupts it with CLIENT UNBLOCK; where that is not allowed, the read ends by itself within BLOCK_MS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from edgellm_producer.connect import BACK_OFF_S, Commands

BLOCK_MS: Final = 1000
BLOCK_MARGIN_S: Final = 2.0
UNBLOCK_AGAIN_S: Final = 0.005


class ReplyEntry(NamedTuple):
    """`is_done` tells the one answer from a delta."""

    is_done: bool
    payload: bytes


@dataclass(slots=True)
class Feed:
    """One reply key: all entries so far, in order, for every reader that came or comes."""

    position: bytes = b"0-0"
    entries: list[ReplyEntry] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_readers: int = 0
    is_done: bool = False

    def put(self, position: bytes, entry: ReplyEntry) -> None:
        self.position = position
        self.entries.append(entry)
        self.is_done = self.is_done or entry.is_done
        self.changed.set()

    async def entry_at(self, index: int) -> ReplyEntry:
        """The entry at this place, as soon as it is there."""
        while index >= len(self.entries):
            self.changed.clear()
            await self.changed.wait()
        return self.entries[index]


class ReplyReader:
    """`blocked` has one connection, for the read alone; `control` sends the interrupts."""

    def __init__(self, blocked: Commands, control: Commands) -> None:
        self._blocked = blocked
        self._control = control
        self._feeds: dict[bytes, Feed] = {}
        self._has_feeds = asyncio.Event()
        self._client_id: int | None = None
        self._is_blocked = False
        self._num_changes = 0  # feeds added so far, and one for closing
        self._num_changes_read = 0  # as many of them as the read in progress knows
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._unblocker: asyncio.Task[None] | None = None

    @contextmanager
    def feed(self, key: str) -> Iterator[Feed]:
        name = key.encode()
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = Feed()
            self._has_feeds.set()
            self._interrupt()
        feed.num_readers += 1
        try:
            yield feed
        finally:
            feed.num_readers -= 1
            if feed.num_readers == 0 and self._feeds.get(name) is feed:
                del self._feeds[name]

    def _interrupt(self) -> None:
        """Have the read begin anew with what has changed."""
        self._num_changes += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._is_blocked and self._unblocker is None:
            self._unblocker = asyncio.create_task(self._unblock())

    async def _unblock(self) -> None:
        """Until the read knows every change: an interrupt that arrives before the read itself does nothing."""
        from redis.exceptions import RedisError  # noqa: PLC0415

        try:
            while self._is_blocked and self._num_changes_read != self._num_changes and self._client_id is not None:
                await self._control.execute("CLIENT", "UNBLOCK", self._client_id)
                await asyncio.sleep(UNBLOCK_AGAIN_S)
        except (RedisError, OSError):
            pass  # the read ends by itself within BLOCK_MS
        finally:
            self._unblocker = None

    async def _run(self) -> None:
        from redis.exceptions import RedisError  # noqa: PLC0415

        failures = 0
        while not self._is_closing:
            if all(feed.is_done for feed in self._feeds.values()):
                self._has_feeds.clear()
                await self._has_feeds.wait()
                continue
            try:
                if self._client_id is None:
                    self._client_id = int(await self._blocked.execute("CLIENT", "ID"))
                await self._read_once()
                failures = 0
            except (RedisError, OSError):
                self._client_id = None
                await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1

    async def _read_once(self) -> None:
        reading = {name: feed for name, feed in self._feeds.items() if not feed.is_done}
        if not reading:
            return  # they left while the connection was made
        self._num_changes_read = self._num_changes
        self._is_blocked = True
        try:
            reply = await self._blocked.execute(
                "XREAD", "BLOCK", BLOCK_MS, "STREAMS", *reading, *(feed.position for feed in reading.values())
            )
        finally:
            self._is_blocked = False
        for name, entries in reply or ():
            feed = reading[name]
            for entry_id, fields in entries:
                kind, payload = fields[:2]
                feed.put(entry_id, ReplyEntry(kind == b"done", payload))

    async def close(self) -> None:
        """A blocked read is not cancelled but interrupted: a cancelled one leaves its connection in the middle."""
        self._is_closing = True
        if self._task is not None:
            self._has_feeds.set()
            self._interrupt()
            await self._task
        if self._unblocker is not None:
            await self._unblocker
