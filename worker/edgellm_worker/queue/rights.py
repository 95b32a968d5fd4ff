"""What a worker and a producer may do on the server: the least that their work needs.

Theory. Redis checks the commands inside a script as if their caller had sent them, so both lists hold what the scripts
call (tests compare them with the scripts' text and take each command away in turn). Every key and the one channel of a
queue share its prefix. Neither user can see another queue, the server's settings or other clients. `CLIENT UNBLOCK`
could interrupt a stranger's blocked read, which costs that reader a retry; without it new waits of a producer start up
to a second late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from edgellm_producer.keys import Keys
from edgellm_producer.topology import Kind


class Role(StrEnum):
    WORKER = "worker"
    PRODUCER = "producer"


COMMANDS: Final[dict[Role, tuple[str, ...]]] = {
    Role.WORKER: (
        *("eval", "evalsha", "info", "subscribe", "publish", "time", "type"),
        *("del", "exists", "get", "mget", "pexpire", "set"),
        *("hdel", "hget", "hincrby", "hmget", "hset", "lpop", "lpos", "lrem"),
        *("zadd", "zcard", "zrangebyscore", "zrem", "zscan"),
        *("xack", "xadd", "xclaim", "xdel", "xlen", "xpending", "xrange", "xread", "xreadgroup"),
        *("xgroup|create", "xgroup|createconsumer", "xgroup|delconsumer", "xinfo|consumers", "xinfo|groups"),
    ),
    Role.PRODUCER: (
        *("eval", "evalsha", "client|id", "client|unblock", "publish", "time", "type"),
        *("del", "exists", "get", "pexpire", "set"),
        *("hdel", "hget", "hincrby", "hmget", "hset", "llen", "lpop", "lrem", "rpush"),
        *("zadd", "zcard", "zrem", "zscan"),
        *("xack", "xadd", "xdel", "xlen", "xpending", "xrange", "xread"),
    ),
}
PROBES: Final = (
    ("time", ("TIME",)),
    ("type", ("TYPE", "@")),
    ("publish", ("PUBLISH", "{prefix}events", "")),
    ("del", ("DEL", "@")),
    ("exists", ("EXISTS", "@")),
    ("get", ("GET", "@")),
    ("mget", ("MGET", "@")),
    ("pexpire", ("PEXPIRE", "@", "1")),
    ("set", ("SET", "@", "", "XX")),
    ("hdel", ("HDEL", "@", "f")),
    ("hget", ("HGET", "@", "f")),
    ("hincrby", ("HINCRBY", "@", "f", "no number")),
    ("hmget", ("HMGET", "@", "f")),
    ("hset", ("HSET", "@", "f", "v", "half a pair")),
    ("lpop", ("LPOP", "@")),
    ("lpos", ("LPOS", "@", "x")),
    ("lrem", ("LREM", "@", "0", "x")),
    ("zadd", ("ZADD", "@", "no number", "x")),
    ("zcard", ("ZCARD", "@")),
    ("zrangebyscore", ("ZRANGEBYSCORE", "@", "1", "0")),
    ("zrem", ("ZREM", "@", "x")),
    ("zscan", ("ZSCAN", "@", "0")),
    ("xack", ("XACK", "@", "g", "0-1")),
    ("xadd", ("XADD", "@", "0-0", "f", "v")),
    ("xclaim", ("XCLAIM", "@", "g", "c", "0", "0-1")),
    ("xdel", ("XDEL", "@", "0-1")),
    ("xlen", ("XLEN", "@")),
    ("xpending", ("XPENDING", "@", "g")),
    ("xrange", ("XRANGE", "@", "1", "0")),
    ("xread", ("XREAD", "COUNT", "1", "STREAMS", "@", "0")),
    ("xreadgroup", ("XREADGROUP", "GROUP", "g", "c", "COUNT", "1", "STREAMS", "@", ">")),
    ("xgroup|create", ("XGROUP", "CREATE", "@", "g", "0")),
    ("xgroup|createconsumer", ("XGROUP", "CREATECONSUMER", "@", "g", "c")),
    ("xgroup|delconsumer", ("XGROUP", "DELCONSUMER", "@", "g", "c")),
    ("xinfo|consumers", ("XINFO", "CONSUMERS", "@", "g")),
    ("xinfo|groups", ("XINFO", "GROUPS", "@")),
)
"""A harmless form of each command that a worker's scripts may call, for probe.lua; `@` is a key that does not exist."""
TOPOLOGY_COMMANDS: Final = {Kind.SINGLE: (), Kind.SENTINEL: ("role",), Kind.CLUSTER: ("cluster|slots",)}


@dataclass(frozen=True, slots=True)
class Rights:
    """One user. `words` are the arguments of ACL SETUSER, in an order that every version accepts."""

    role: Role
    user: str
    queue: str
    kind: Kind = Kind.SINGLE
    database: int = 0

    @property
    def commands(self) -> tuple[str, ...]:
        select = ("select",) if self.database else ()
        return COMMANDS[self.role] + TOPOLOGY_COMMANDS[self.kind] + select

    def words(self, password: str) -> Iterator[str]:
        """`password` as the server takes it: `>clear`, or `#` and its SHA-256."""
        pattern = f"{Keys(self.queue).prefix}*"
        yield from ("reset", "on", password, f"~{pattern}", "resetchannels", f"&{pattern}")
        for command in self.commands:
            yield f"+{command}"
