"""Redis connections, made in one place with every setting written out.

The library's defaults are not ours: its URLs carry no retries, time out idle blocking reads, or never notice a dead
peer, depending on its version. topology.py says which URLs there are, and which server each means at the moment; it is
asked anew for every connection.

`Commands` sends over the library's connections without its client around them: no pool bookkeeping, no telemetry, one
timeout for a whole command instead of four. Replies are those of protocol 2 as they come, flat lists and bytes.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from edgellm_producer.topology import Kind, Question, Target, slot_of

if TYPE_CHECKING:
    import redis
    import redis.asyncio

BACK_OFF_S: Final = (0.05, 0.2, 0.5, 1.0)
QUESTION_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """timeout_s bounds every reply: a blocking read needs its block time plus 2 s. `retries` may be above 0 only where
    every command sent is harmless when it runs twice. `route_key` is a key of the queue: it finds the Cluster node.
    """

    timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    max_connections: int = 20
    retries: int = 0
    password: str | None = field(default=None, repr=False)
    route_key: str = ""

    def for_question(self, question: Question) -> LinkOptions:
        timeout_s = min(QUESTION_TIMEOUT_S, self.connect_timeout_s)
        password = None if question.is_for_sentinel else self.password
        return replace(self, timeout_s=timeout_s, connect_timeout_s=timeout_s, password=password)

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
            **_nameless(),
        }


_HINTS: Final = (
    ("ReadOnlyError", "-readonly ", "this server is a replica: give the URL of its master, or a redis+sentinel:// URL"),
    ("MovedError", "-moved ", "this server is one node of a Cluster: give a redis+cluster:// URL"),
    ("ClusterError", "-clusterdown ", "this server is a node of a Cluster that is not whole"),
    ("NoPermissionError", "the user executing the script", "`edgellm-worker acl` prints the rules that a user needs"),
)
"""By the library's type, or by what is left of it where a script met it, in lower case."""


def in_words(error: Exception) -> str:
    """What the network or Redis said, and what to do about it; a time-out of asyncio's says nothing."""
    said = f"{type(error).__name__}: {str(error) or 'no answer in time'}"
    names = {kind.__name__ for kind in type(error).__mro__}
    return said + next((f"; {hint}" for name, word, hint in _HINTS if name in names or word in said.lower()), "")


def _nameless() -> dict[str, None]:
    """No CLIENT SETINFO on connecting: a user of least rights may not send it. Releases spell this differently."""
    from importlib.util import find_spec  # noqa: PLC0415

    return dict.fromkeys(("driver_info",) if find_spec("redis.driver_info") else ("lib_name", "lib_version"))


def _pool_at(url: str, options: LinkOptions, timeout_s: float | None) -> redis.asyncio.ConnectionPool:
    """A factory of asyncio connections to one server."""
    from redis.asyncio import ConnectionPool  # noqa: PLC0415
    from redis.asyncio.connection import parse_url  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415

    address: dict[str, Any] = dict(parse_url(url))
    pool: redis.asyncio.ConnectionPool = ConnectionPool(
        **options.keywords(address, timeout_s), retry=Retry(NoBackoff(), 0)
    )
    return pool


class Dialer:
    """Makes connections to the server that the URL means now; ValueError for a URL that means none."""

    def __init__(self, url: str, options: LinkOptions, timeout_s: float | None) -> None:
        self._target = Target.parse(url)
        self._options = options
        self._timeout_s = timeout_s
        self._slot = slot_of(options.route_key)
        self._fixed = _pool_at(url, options, timeout_s) if self._target.kind is Kind.SINGLE else None

    async def pool(self) -> redis.asyncio.ConnectionPool:
        self._target.check_files()
        return self._fixed or _pool_at(await self._find(), self._options, self._timeout_s)

    async def connection(self) -> Any:
        """Not connected yet: its first command does that."""
        return cast("Any", await self.pool()).make_connection()

    async def _find(self) -> str:
        dialogue, reply = self._target.dialogue(self._slot), None
        while True:
            try:
                question = dialogue.send(reply)
            except StopIteration as end:
                return str(end.value)
            reply = await self._ask(question)

    async def _ask(self, question: Question) -> Any:
        from redis.exceptions import RedisError  # noqa: PLC0415

        options = self._options.for_question(question)
        connection = cast("Any", _pool_at(question.url, options, options.timeout_s)).make_connection()
        try:
            async with asyncio.timeout(options.timeout_s):
                await connection.send_command(*question.words)
                return await connection.read_response()
        except (RedisError, OSError) as error:
            return error
        finally:
            await connection.disconnect(nowait=True)


def _client_at(url: str, options: LinkOptions) -> redis.Redis:
    from redis import ConnectionPool, Redis  # noqa: PLC0415
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.connection import parse_url  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    address: dict[str, Any] = cast("Any", parse_url)(url)
    settings = {**options.keywords(address, options.timeout_s), "retry": Retry(NoBackoff(), 0)}
    client: redis.Redis = Redis.from_pool(cast("Any", ConnectionPool)(**settings))
    return client


def connect_blocking(url: str, options: LinkOptions) -> redis.Redis:
    """A synchronous client of the server that the URL means now, with one try per command. It stays with that server:
    make a new one after an error.
    """
    from redis.exceptions import RedisError  # noqa: PLC0415

    dialogue, reply = Target.parse(url).dialogue(slot_of(options.route_key)), None
    while True:
        try:
            question = dialogue.send(reply)
        except StopIteration as end:
            return _client_at(str(end.value), options)
        connection: Any = _client_at(question.url, options.for_question(question)).connection_pool.make_connection()
        try:
            connection.send_command(*question.words)
            reply = connection.read_response()
        except (RedisError, OSError) as error:
            reply = error
        finally:
            connection.disconnect()


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
        self._dialer = Dialer(url, options, None)
        self._idle: list[Any] = []
        self._places = asyncio.Semaphore(options.max_connections)

    async def execute(self, *words: str | bytes | int) -> Any:
        """Raises the library's `ResponseError` for what Redis refuses, `ConnectionError` or `TimeoutError` (its own, or
        the built-in ones) for what the network does.
        """
        from redis.exceptions import RedisError  # noqa: PLC0415

        for pause_s in BACK_OFF_S[: self._options.retries]:
            try:
                return await self._once(words)
            except (RedisError, OSError) as error:
                if not _is_worth_another_try(error):
                    raise
                await asyncio.sleep(pause_s)
        return await self._once(words)

    async def _once(self, words: tuple[str | bytes | int, ...]) -> Any:
        from redis.exceptions import ResponseError  # noqa: PLC0415

        packed = self._pack(words)
        async with self._places:
            connection = self._idle.pop() if self._idle else None
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    if connection is None:
                        connection = await self._dialer.connection()
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
            if one is not None:
                await one.disconnect(nowait=True)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()


def _is_about_the_server(error: Exception) -> bool:
    """The server at the other end is not the one to talk to: connect anew, which asks for the right one.

    Redis 6.2 wraps what a command in a script said; a blocked read that a demotion ended says so in words alone.
    """
    from redis.exceptions import BusyLoadingError, ClusterError, MovedError, ReadOnlyError  # noqa: PLC0415

    text = str(error)
    is_typed = isinstance(error, (ReadOnlyError, MovedError, ClusterError, BusyLoadingError))
    return is_typed or "-READONLY " in text or "instance state changed" in text


def _is_worth_another_try(error: Exception) -> bool:
    """Nothing was done, or doing it again is harmless; and another try may meet a better world."""
    from redis.exceptions import AuthenticationError, ResponseError  # noqa: PLC0415

    if isinstance(error, ResponseError):
        return _is_about_the_server(error)
    return not isinstance(error, AuthenticationError)
