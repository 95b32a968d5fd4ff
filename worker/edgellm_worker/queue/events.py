"""The pub/sub hints. Keys are the truth (`cancel:<id>`, the pending lists): a lost hint costs a second, no more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from edgellm_producer.connect import Dialer
from edgellm_producer.keys import Keys
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.link import link_options

logger = logging.getLogger(__name__)


class EventListener:
    """Calls `on_event(word, argument)` for every message `word [argument]` of the queue's channel."""

    POLL_S = 1.0
    BACK_OFF_S = 1.0

    def __init__(self, config: QueueConfig, on_event: Callable[[str, str], None]) -> None:
        self._channel = Keys(config.queue).events
        self._on_event = on_event
        options = link_options(config, config.command_timeout_s)
        self._dialer = Dialer(config.url, options, config.command_timeout_s)
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._was_deaf = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while not self._closing:
            try:
                await self._subscribed()
            except (RedisError, OSError) as error:
                if not self._was_deaf:
                    logger.warning("cancellations are heard a second late: %s", error)
                self._was_deaf = True
                await asyncio.sleep(self.BACK_OFF_S)

    async def _subscribed(self) -> None:
        client = Redis(connection_pool=await self._dialer.pool())
        async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._channel)
            self._was_deaf = False
            while not self._closing:
                message = await pubsub.get_message(timeout=self.POLL_S)
                if message is not None:
                    word, _, argument = message["data"].decode("utf-8", "replace").partition(" ")
                    self._on_event(word, argument)

    async def close(self) -> None:
        """The connection goes with the task, so there is no reply that its cancelling could leave behind."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
