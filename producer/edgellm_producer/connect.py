"""Redis connections, made in one place with every setting written out.

The library's defaults are not ours: its URLs carry no retries, time out idle blocking reads, or never notice a dead
peer, depending on its version. Accepted URLs:

    redis://[user:password@]host[:port][/db]
    rediss://...?ssl_ca_certs=ca.pem&ssl_certfile=client.pem&ssl_keyfile=client.key      the same over TLS
    unix://[user:password@]/path.sock[?db=0]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import redis
    import redis.asyncio


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

    def keywords(self, address: dict[str, Any]) -> dict[str, Any]:
        """Connection settings for an address as the library parsed it; ours win over what the URL says."""
        over_tcp = {} if "path" in address else {"socket_keepalive": True}
        return {
            **address,
            **over_tcp,
            **({} if self.password is None else {"password": self.password}),
            "socket_timeout": self.timeout_s,
            "socket_connect_timeout": self.connect_timeout_s,
            "health_check_interval": 0,
            "protocol": 2,
            "max_connections": self.max_connections,
            "timeout": self.timeout_s,
        }


def connect(url: str, options: LinkOptions = LinkOptions()) -> redis.asyncio.Redis:
    """An asyncio client with a pool that waits for a free connection. Nothing is sent before the first command."""
    from redis.asyncio import BlockingConnectionPool, Redis  # noqa: PLC0415
    from redis.asyncio.connection import parse_url  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import ExponentialWithJitterBackoff  # noqa: PLC0415

    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), options.retries)
    settings: dict[str, Any] = {**options.keywords(dict(parse_url(url))), "retry": retry}
    client: redis.asyncio.Redis = Redis.from_pool(BlockingConnectionPool(**settings))
    return client


def connect_blocking(url: str, options: LinkOptions = LinkOptions()) -> redis.Redis:
    """The same, synchronous."""
    from redis import BlockingConnectionPool, Redis  # noqa: PLC0415
    from redis.backoff import ExponentialWithJitterBackoff  # noqa: PLC0415
    from redis.connection import parse_url  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), options.retries)
    address: dict[str, Any] = cast("Any", parse_url)(url)
    settings: dict[str, Any] = {**options.keywords(address), "retry": retry}
    client: redis.Redis = Redis.from_pool(cast("Any", BlockingConnectionPool)(**settings))
    return client
