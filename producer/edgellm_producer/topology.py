"""Which server a URL means.

    redis://, rediss://, unix://          one server, in the words of redis-py (ssl_ca_certs, ssl_certfile, ssl_keyfile)
    redis+sentinel://[user:password@]host:port,host:port/SERVICE[/db][?sentinel_password=...&sentinel_username=...]
    redis+cluster://[user:password@]host:port,host:port                 (rediss+...: the same over TLS)

Sans I/O: `Target.dialogue` yields questions and is sent the replies (or the errors instead), and returns the URL of the
one server to talk to: the master that a Sentinel names and that says so itself, or the Cluster node that owns the
queue's slot. All keys of a queue share a slot, so one server is all there is to know. The dialogue is held anew for
every connection, and connections to a server that turned out to be the wrong one (READONLY, MOVED) are dropped: that is
the whole of failover.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from errno import ENOENT
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

Address = tuple[str, int]

FILE_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
SINGLE_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})


class Kind(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


DEFAULT_PORTS: Final = {Kind.SENTINEL: 26379, Kind.CLUSTER: 6379}


@dataclass(frozen=True, slots=True)
class Question:
    """A command for the server at `url`. A Sentinel does not know the password of the servers that it watches over."""

    url: str
    words: tuple[str, ...]
    is_for_sentinel: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """`credentials` is the URL's part before the hosts, with its @; `query` goes to every server, except that the
    Sentinels have credentials of their own.
    """

    kind: Kind
    database: int
    url: str = field(default="", repr=False)
    scheme: str = "redis"
    credentials: str = field(default="", repr=False)
    seeds: tuple[Address, ...] = ()
    service: str = ""
    query: str = ""
    sentinel_credentials: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ValueError; its message never holds the URL, which may hold a password."""
        parts = urlsplit(url)
        base, _, word = parts.scheme.partition("+")
        if base != "rediss" and (wrong := [name for name, _ in parse_qsl(parts.query) if name.startswith("ssl_")]):
            raise ValueError(f"redis URL: {wrong[0]} is for rediss:// and rediss+...://, not for {parts.scheme}://")
        if not word:
            if base not in SINGLE_SCHEMES:
                known = "redis, rediss, unix, redis+sentinel, redis+cluster"
                raise ValueError(f"redis URL: scheme {parts.scheme!r} is none of {known}")
            _check_port(parts)
            return cls(Kind.SINGLE, _database_of(parts), url=url, query=parts.query)
        if base not in {"redis", "rediss"} or word not in {Kind.SENTINEL, Kind.CLUSTER}:
            raise ValueError(f"redis URL: scheme {parts.scheme!r} is not known")
        return cls._of_many(parts, base, Kind(word))

    @classmethod
    def _of_many(cls, parts: SplitResult, scheme: str, kind: Kind) -> Self:
        credentials, at, hosts = parts.netloc.rpartition("@")
        seeds = tuple(_address(host, DEFAULT_PORTS[kind]) for host in hosts.split(",") if host)
        if not seeds:
            raise ValueError("redis URL: it names no host")
        service, _, database = parts.path.strip("/").partition("/")
        options = dict(parse_qsl(parts.query))
        database = options.pop("db", database)
        if (kind is Kind.SENTINEL) is not bool(service) or not (database or "0").isdigit():
            wanted = "host:port,.../SERVICE[/db]" if kind is Kind.SENTINEL else "host:port,... without a path"
            raise ValueError(f"redis URL: wanted {parts.scheme}://{wanted}")
        user, password = options.pop("sentinel_username", ""), options.pop("sentinel_password", "")
        return cls(
            kind=kind,
            database=int(database or 0),
            scheme=scheme,
            credentials=credentials + at,
            seeds=seeds,
            service=service,
            query=urlencode(options),
            sentinel_credentials=f"{quote(user)}:{quote(password)}@" if password else "",
        )

    def check_files(self) -> None:
        """Raises FileNotFoundError with the option's name: the library's own error names neither that nor the file."""
        for name, path in parse_qsl(self.query):
            if name in FILE_OPTIONS and not Path(path).exists():
                raise FileNotFoundError(ENOENT, f"{name}: no such file", path)

    def dialogue(self, slot: int) -> Generator[Question, Any, str]:
        """Raises the library's ConnectionError when nobody names a server."""
        if self.kind is Kind.SINGLE:
            return self.url
        ask = self._ask_sentinel if self.kind is Kind.SENTINEL else self._ask_node
        last: Any = None
        for seed in self.seeds:
            address, last = yield from ask(seed, slot)
            if address is not None:
                return self._url_of(address)
        raise _nobody(self.seeds, last)

    def _ask_sentinel(self, seed: Address, _: int) -> Generator[Question, Any, tuple[Address | None, Any]]:
        """A Sentinel that is behind names a master of yesterday: the server itself has the last word."""
        url = _server_url(self.scheme, self.sentinel_credentials, seed, "", self.query)
        named = yield Question(url, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service), is_for_sentinel=True)
        if not isinstance(named, list):
            return None, named or f"{seed[0]} knows no service {self.service}"
        address = named[0].decode(), int(named[1])
        role = yield Question(self._url_of(address), ("ROLE",))
        if isinstance(role, list) and role[0] == b"master":
            return address, None
        return None, role if isinstance(role, Exception) else f"{address[0]}:{address[1]} is no master"

    def _ask_node(self, seed: Address, slot: int) -> Generator[Question, Any, tuple[Address | None, Any]]:
        """A node that does not know its own name answers with an empty one: it is the one that was asked."""
        ranges = yield Question(self._url_of(seed), ("CLUSTER", "SLOTS"))
        if not isinstance(ranges, list):
            return None, ranges
        for first, last, node, *_ in ranges:
            if first <= slot <= last:
                return ((node[0].decode() if node[0] else seed[0]), int(node[1])), None
        return None, f"nobody owns slot {slot}"

    def _url_of(self, address: Address) -> str:
        return _server_url(self.scheme, self.credentials, address, f"/{self.database}", self.query)


def _server_url(scheme: str, credentials: str, address: Address, path: str, query: str) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{scheme}://{credentials}{host}:{address[1]}{path}" + (f"?{query}" if query else "")


def _address(text: str, default_port: int) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), default_port
    if not port.isdigit():
        raise ValueError(f"redis URL: port {port!r} is no number")
    return host.strip("[]"), int(port)


def _check_port(parts: SplitResult) -> None:
    try:
        _ = parts.port
    except ValueError as error:
        hint = "a password's own : / # ? @ % are written %3A and so on"
        raise ValueError(f"redis URL: its port is no number from 0 to 65535 ({hint})") from error


def _database_of(parts: SplitResult) -> int:
    text = dict(parse_qsl(parts.query)).get("db") or ("" if parts.scheme == "unix" else parts.path.strip("/"))
    if text and not text.isdigit():
        raise ValueError(f"redis URL: database {text!r} is no number")
    return int(text or 0)


def slot_of(key: str) -> int:
    from redis.crc import key_slot  # noqa: PLC0415 - importing redis costs more than this whole package

    return int(key_slot(key.encode()))


def _nobody(seeds: tuple[Address, ...], last: Any) -> Exception:
    from redis.exceptions import ConnectionError as RedisConnectionError  # noqa: PLC0415

    asked = ", ".join(f"{host}:{port}" for host, port in seeds)
    return RedisConnectionError(f"none of {asked} names a server to talk to: {last}")
