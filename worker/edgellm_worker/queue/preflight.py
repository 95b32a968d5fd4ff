"""Is this a server that a worker can work on? Asked once, before anything is read or written.

What only an operator can mend is told apart from what passes: a supervisor should not start a worker without rights
again and again, but a server that is loading, or a replica in the middle of a failover, is worth another try.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import NoPermissionError

from edgellm_producer.keys import Keys
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.errors import QueueMisconfigured, QueueUnavailable
from edgellm_worker.queue.link import Link
from edgellm_worker.queue.rights import PROBES

logger = logging.getLogger(__name__)


async def inspect_server(link: Link, config: QueueConfig) -> None:
    """Raises `QueueMisconfigured` naming every right that is missing."""
    policy = (await link.info("memory")).get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        logger.warning("maxmemory-policy is %s: Redis may drop accepted jobs; set it to noeviction", policy)
    words: list[str | bytes | int] = []
    for _, given in PROBES:
        words += (len(given), *(word.format(prefix=Keys(config.queue).prefix) for word in given))
    refused = await link.run("probe", words)
    if refused:
        raise QueueMisconfigured(_missing(config, {_rule(said.decode(), config, PROBES[n][0]) for n, said in refused}))


@contextmanager
def told_apart(config: QueueConfig) -> Iterator[None]:
    """Missing rights are the operator's to mend, whatever else passes."""
    try:
        yield
    except QueueUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, NoPermissionError):
            raise QueueMisconfigured(_missing(config, {_rule(str(cause), config, "")})) from cause
        raise


def _rule(said: str, config: QueueConfig, command: str) -> str:
    """The word of ACL SETUSER that is missing."""
    pattern = f"{Keys(config.queue).prefix}*"
    if "channel" in said:
        return f"&{pattern}"
    if " key" in said:
        return f"~{pattern}"
    named = re.search("'([^']+)' command", said)
    return f"+{command or (named[1] if named else said)}"


def _missing(config: QueueConfig, rules: set[str]) -> str:
    return (
        f"Redis (--redis-url) refuses this user what it needs: {' '.join(sorted(rules))}; "
        f"`edgellm-worker acl --queue {config.queue}` prints the whole list"
    )
