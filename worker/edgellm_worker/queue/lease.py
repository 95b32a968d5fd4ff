"""The lease keeper: a thread that renews what the worker holds, whatever its event loop or its engine is doing.

Theory. A lease is the idle time of a pending entry, counted by Redis: no clock of ours takes part. Renewing resets it.
With period lease / 3 two renewals in a row may fail before the lease runs out; after a failure the next try comes
sooner. The thread has its own connection, and its work between two commands needs the interpreter lock for
microseconds. It runs until the last reply is written: a drain longer than the lease must not hand out jobs twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import RedisError

from edgellm_producer.keys import Keys
from edgellm_producer.scripts import run_blocking
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.held import HeldTable, ReplyClock
from edgellm_worker.queue.scripts import script

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 3
RETRIES_PER_RENEWAL: Final = 5


class LeaseKeeper:
    """`connect` makes a synchronous client of the server in charge; it is called in the thread, again after each error,
    as another server may be in charge by then. `on_news` is called from the thread whenever a
    held job was found lost or cancelled.
    """

    def __init__(
        self,
        config: QueueConfig,
        held: HeldTable,
        clock: ReplyClock,
        *,
        connect: Callable[[], Any],
        on_news: Callable[[], None],
    ) -> None:
        self._config = config
        self._held = held
        self._clock = clock
        self._connect = connect
        self._client: Any = None
        self._on_news = on_news
        self._key = Keys(config.queue).config
        self._stop = threading.Event()
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended, at the latest after one command's timeout."""
        self._stop.set()
        self._thread.join()

    @property
    def renewal_age_s(self) -> float:
        """Seconds since the last renewal that Redis confirmed."""
        return time.monotonic() - self._renewed_at

    def _run(self) -> None:
        period_s = self._config.lease_s / RENEWALS_PER_LEASE
        try:
            pause_s = 0.0
            while not self._stop.wait(pause_s):
                started = time.monotonic()
                renewed = self._try_renew()
                wanted_s = period_s if renewed else period_s / RETRIES_PER_RENEWAL
                pause_s = max(0.0, wanted_s - (time.monotonic() - started))
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _try_renew(self) -> bool:
        try:
            if self._client is None:
                self._client = self._connect()
            lost, cancelled = self._renew(self._client)
        except (RedisError, OSError) as error:
            self._disconnect()
            logger.warning("leases not renewed for %.1f s: %s", self.renewal_age_s, error)
            return False
        self._renewed_at = time.monotonic()
        self._clock.touch()
        if lost or cancelled:
            self._held.mark_cancelled(cancelled)
            self._held.mark_lost(lost)
            self._on_news()
        return True

    def _renew(self, client: Any) -> tuple[list[str], list[str]]:
        args: list[str | bytes | int] = [
            self._config.consumer,
            self._config.liveness_ms,
            ",".join(self._config.served_models),
        ]
        for entry in self._held.snapshot():
            args += entry
        lost, cancelled = run_blocking(client, script("renew"), self._key, args)
        return [item.decode() for item in lost], [item.decode() for item in cancelled]
