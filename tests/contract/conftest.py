from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.queue_rig import Rig, open_rig
from tests.support.redis_server import RedisServer


@pytest.fixture
async def rig(server: RedisServer, queue_name: str) -> AsyncIterator[Rig]:
    """A fresh queue on each version of the server in turn."""
    async with open_rig(server, queue_name) as opened:
        yield opened


@pytest.fixture
async def one_rig(default_server: RedisServer, queue_name: str) -> AsyncIterator[Rig]:
    """A fresh queue on one version."""
    async with open_rig(default_server, queue_name) as opened:
        yield opened
