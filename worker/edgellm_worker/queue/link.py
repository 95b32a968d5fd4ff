"""The worker's line to Redis: runs scripts, notes every reply, and maps the library's errors in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisError

from edgellm_producer.connect import Commands, LinkOptions, in_words
from edgellm_producer.keys import Keys
from edgellm_producer.scripts import run
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.queue.held import ReplyClock
from edgellm_worker.queue.scripts import script


def link_options(config: QueueConfig, timeout_s: float, max_connections: int = 20) -> LinkOptions:
    """No command is repeated by the connection: a repeat is the caller's decision."""
    return LinkOptions(
        timeout_s=timeout_s,
        max_connections=max_connections,
        password=config.password,
        route_key=Keys(config.queue).config,
    )


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Whatever Redis or the network says, the caller's answer is the same: keep what you have and try again."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnavailable(in_words(error)) from error


class Link:
    """Runs scripts, one round trip each."""

    def __init__(self, config: QueueConfig, clock: ReplyClock) -> None:
        self._clock = clock
        self._config_key = Keys(config.queue).config
        self.num_reconnects = 0
        self._is_down = False
        self._commands = Commands(config.url, link_options(config, config.command_timeout_s))

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Any:
        try:
            with mapped_errors():
                reply = await run(self._commands.execute, script(name), self._config_key, args)
        except QueueUnavailable:
            self._is_down = True
            raise
        if self._is_down:
            self._is_down = False
            self.num_reconnects += 1
        self._clock.touch()
        return reply

    async def info(self, section: str) -> dict[str, str]:
        with mapped_errors():
            reply: bytes = await self._commands.execute("INFO", section)
        self._clock.touch()
        lines = (line.partition(":") for line in reply.decode().splitlines() if ":" in line)
        return {name: value for name, _, value in lines}

    async def close(self) -> None:
        with mapped_errors():
            await self._commands.close()


class Waiter:
    """The blocked read, on a connection of its own. It reads without a group, so it takes nothing: a reply that is lost
    or comes too late costs a wake-up, never a job. It is never cancelled; a `wait` that ends before it leaves it to the
    next one.
    """

    BLOCK_MARGIN_S = 2.0
    BACK_OFF_S = 0.5

    def __init__(self, config: QueueConfig, clock: ReplyClock) -> None:
        self._clock = clock
        self._block_ms = config.block_ms
        self._lanes = Keys(config.queue).lanes
        timeout_s = config.block_ms / 1000 + self.BLOCK_MARGIN_S
        self._commands = Commands(config.url, link_options(config, timeout_s, max_connections=1))
        self._read: asyncio.Task[None] | None = None
        self._is_blocked = False

    @property
    def is_blocked(self) -> bool:
        """A read is under way, and nothing has come since its ids."""
        return self._is_blocked

    def reading(self, last_ids: Sequence[str]) -> asyncio.Task[None]:
        """The read in progress, or a new one from these ids."""
        if self._read is None or self._read.done():
            self._read = asyncio.create_task(self._block(last_ids))
        return self._read

    async def _block(self, last_ids: Sequence[str]) -> None:
        self._is_blocked = True
        try:
            await self._commands.execute(
                "XREAD", "COUNT", 1, "BLOCK", self._block_ms, "STREAMS", *self._lanes, *last_ids
            )
        except (RedisError, OSError):
            self._is_blocked = False
            await asyncio.sleep(self.BACK_OFF_S)  # `take` is who reports it
        else:
            self._clock.touch()
        finally:
            self._is_blocked = False

    async def close(self) -> None:
        """Waits for the read to end: its block time at most."""
        if self._read is not None:
            await self._read
        with mapped_errors():
            await self._commands.close()
