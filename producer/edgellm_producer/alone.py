"""Telling a user that nobody works where the jobs go: a wrong Redis, database or queue name looks like a long wait.

Every worker keeps the queue's `lease` key alive, for a minute after its last sign of life (two leases), so one EXISTS
answers. It is asked only by those who have waited for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from edgellm_producer.errors import EdgellmError

if TYPE_CHECKING:
    from edgellm_producer.client import Producer

TELL_AFTER_S: Final = 3.0
_ASK_WITHIN_S: Final = 0.5


async def alone_in_words(producer: Producer) -> str | None:
    """None when a worker lives, or when the queue cannot be asked at once."""
    with contextlib.suppress(EdgellmError, TimeoutError):
        async with asyncio.timeout(_ASK_WITHIN_S):
            if not await producer.has_worker():
                return f"no worker serves queue {producer.keys.queue!r} there: is it their Redis, database and --queue?"
    return None


@asynccontextmanager
async def told_when_alone(producer: Producer, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """While the body waits: `tell` once, after 3 s, when no worker lives."""

    async def look() -> None:
        await asyncio.sleep(TELL_AFTER_S)
        words = await alone_in_words(producer)
        if words is not None:
            tell(words)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
