"""Server-side scripts: loading them, and running one in one round trip.

A script is `lua/common.lua` (key names, the fence), then shared pieces of its own package, then its own file. They use
commands of Redis 6.2 only. `run` sends the digest; a server that does not know it (new, restarted, flushed) says
NOSCRIPT without having done anything, and gets the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

PACKAGE: Final = "edgellm_producer"


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    source: str
    digest: str


def read_lua(package: str, name: str) -> str:
    return files(package).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def compose(name: str, *pieces: str) -> Script:
    source = "\n".join((read_lua(PACKAGE, "common"), *pieces))
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())  # noqa: S324 - what EVALSHA is defined by


@cache
def script(name: str) -> Script:
    """A script of the producer's: submit, cancel, status, dead."""
    return compose(name, read_lua(PACKAGE, name))


Execute = Callable[..., Awaitable[Any]]


async def run(execute: Execute, wanted: Script, config_key: str, args: Sequence[str | bytes | int]) -> Any:
    """Run through `Commands.execute`. The one key that is always known is declared: the rest shares its hash tag."""
    from redis.exceptions import NoScriptError  # noqa: PLC0415 - importing redis costs more than this whole package

    try:
        return await execute("EVALSHA", wanted.digest, 1, config_key, *args)
    except NoScriptError:
        return await execute("EVAL", wanted.source, 1, config_key, *args)


def run_blocking(client: Any, wanted: Script, config_key: str, args: Sequence[str | bytes | int]) -> Any:
    """`run` on a synchronous client."""
    from redis.exceptions import NoScriptError  # noqa: PLC0415

    try:
        return client.evalsha(wanted.digest, 1, config_key, *args)
    except NoScriptError:
        return client.eval(wanted.source, 1, config_key, *args)
