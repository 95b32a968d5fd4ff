"""Redis connections, made in one place with every setting written out.

The library's defaults are not ours: its URLs carry no retries, time out idle blocking reads, or never notice a dead
peer, depending on its version. Accepted URLs:

    redis://[user:password@]host[:port][/db]
    rediss://...?ssl_ca_certs=ca.pem&ssl_certfile=client.pem&ssl_keyfile=client.key      the same over TLS
    unix://[user:password@]/path.sock[?db=0]

`Commands` sends over the library's connections without its client around them: no pool bookkeeping, no telemetry, one
timeout for a whole command instead of four. Replies are those of protocol 2 as they come, flat lists and bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    import redis
    import redis.asyncio

BACK_OFF_S: Final = (0.05, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """timeout_s bounds every reply: a blocking read needs its block time plus 2 s. `retries` may be above 0 only where
    every command sent is harmless when it runs twice.
    """

    timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    max_connections: int = 20
    retries: int = 0
    password: str | None = field(default=None, repr=False)

    def keywords(self, address: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        """Connection settings for an address as the library parsed it; ours win over what the URL says."""
        over_tcp = {} if "path" in address else {"socket_keepalive": True}
        return {
            **address,
            **over_tcp,
            **({} if self.password is None else {"password": self.password}),
            "socket_timeout": timeout_s,
            "socket_connect_timeout": self.connect_timeout_s,
            "health_check_interval": 0,
            "protocol": 2,
        }


def make_pool(url: str, options: LinkOptions, timeout_s: float | None) -> redis.asyncio.ConnectionPool:
    """A factory of asyncio connections; ValueError for a URL of another scheme."""
    from redis.asyncio import ConnectionPool  # noqa: PLC0415
    from redis.asyncio.connection import parse_url  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    address: dict[str, Any] = dict(parse_url(url))
    pool: redis.asyncio.ConnectionPool = ConnectionPool(
        **options.keywords(address, timeout_s), retry=Retry(NoBackoff(), 0)
    )
    return pool


def connect_blocking(url: str, options: LinkOptions) -> redis.Redis:
    """A synchronous client with one try per command."""
    from redis import ConnectionPool, Redis  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.connection import parse_url  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    address: dict[str, Any] = cast("Any", parse_url)(url)
    settings = {**options.keywords(address, options.timeout_s), "retry": Retry(NoBackoff(), 0)}
    client: redis.Redis = Redis.from_pool(cast("Any", ConnectionPool)(**settings))
    return client


class Commands:
    """Sends commands, at most `max_connections` at a time; more wait. Connections are made when first needed.

    A connection whose command did not end with a reply (an error of the network, a timeout, a cancelled caller) is
    closed, never used again: no reply can reach the wrong command. After such an error the idle ones go too, as they
    most likely share its fate.
    """

    def __init__(self, url: str, options: LinkOptions) -> None:
        from hiredis import pack_command  # noqa: PLC0415

        self._options = options
        self._pack: Any = pack_command
        pool = make_pool(url, options, None)
        self._make_connection: Callable[[], Any] = pool.make_connection
        self._idle: list[Any] = []
        self._places = asyncio.Semaphore(options.max_connections)

    async def execute(self, *words: str | bytes | int) -> Any:
        """Raises the library's `ResponseError` for what Redis refuses, `ConnectionError` or `TimeoutError` (its own, or
        the built-in ones) for what the network does.
        """
        from redis.exceptions import ConnectionError as RedisConnectionError  # noqa: PLC0415
        from redis.exceptions import TimeoutError as RedisTimeoutError  # noqa: PLC0415

        for pause_s in BACK_OFF_S[: self._options.retries]:
            try:
                return await self._once(words)
            except (RedisConnectionError, RedisTimeoutError, OSError):
                await asyncio.sleep(pause_s)
        return await self._once(words)

    async def _once(self, words: tuple[str | bytes | int, ...]) -> Any:
        from redis.exceptions import ResponseError  # noqa: PLC0415

        packed = self._pack(words)
        async with self._places:
            connection = self._idle.pop() if self._idle else self._make_connection()
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    await connection.send_packed_command(packed, check_health=False)
                    reply = await connection.read_response(timeout=math.inf)
            except ResponseError as error:
                if _is_about_the_server(error):
                    await self._drop(connection)
                else:
                    self._idle.append(connection)
                raise
            except BaseException:
                await self._drop(connection)
                raise
            self._idle.append(connection)
            return reply

    async def _drop(self, connection: Any) -> None:
        idle, self._idle = self._idle, []
        for one in (connection, *idle):
            await one.disconnect(nowait=True)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()


def _is_about_the_server(error: Exception) -> bool:
    """The server at the other end is not the one to talk to: connect anew, which asks for the right one."""
    from redis.exceptions import BusyLoadingError, ClusterError, MovedError, ReadOnlyError  # noqa: PLC0415

    return isinstance(error, (ReadOnlyError, MovedError, ClusterError, BusyLoadingError))
