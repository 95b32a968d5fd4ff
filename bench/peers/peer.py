"""What the measurement needs of a queue: how jobs get in, how a worker process starts, how an answer shows."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol

from server import Server

SOCKET = os.environ["EDGELLM_PEERS_SOCKET"]
URL = f"unix://{SOCKET}"
CONCURRENCY = 32
RESULT_TTL_S = 3600


class Peer(Protocol):
    settings: str
    worker: tuple[str, ...]  # the command of one worker process

    async def open(self) -> None: ...

    async def submit(self, count: int) -> list[str]:
        """In the fastest way that this library documents for many jobs; what stands for each is returned."""

    def waiting(self, server: Server, jobs: list[str]) -> list[str]:
        """The jobs not known to be answered yet; empty once all are."""

    async def close(self) -> None: ...


def program(name: str) -> str:
    """A command of the running virtual environment."""
    return str(Path(sys.executable).with_name(name))


async def gather(count: int, call: Callable[[int], Awaitable[str]]) -> list[str]:
    """All calls, `CONCURRENCY` at a time: for libraries without a bulk call."""
    results: list[str] = [""] * count

    async def several(numbers: Iterable[int]) -> None:
        for number in numbers:
            results[number] = await call(number)

    await asyncio.gather(*(several(range(first, count, CONCURRENCY)) for first in range(CONCURRENCY)))
    return results
