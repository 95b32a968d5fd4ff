"""What an operator can set about the queue."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field


def new_consumer_name() -> str:
    """`<hostname>-<pid>-<nonce>`: new in every process, so that a stopped and resumed one never shares a name."""
    host = "".join(c if c.isalnum() or c in ".-_" else "-" for c in socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """`served_models` are the names this worker answers to; empty means that it takes part in no check.
    `password` is for those who keep it out of the URL; it wins over the URL's.
    """

    url: str = "redis://localhost:6379/0"
    password: str | None = field(default=None, repr=False)
    queue: str = "default"
    consumer: str = field(default_factory=new_consumer_name)
    served_models: tuple[str, ...] = ()
    lease_s: float = 30.0
    block_ms: int = 1000
    ageing_s: float = 30.0
    reclaim_interval_s: float = 0.5
    max_attempts: int = 3
    max_solo_kills: int = 2
    max_dead_letters: int = 10_000
    newer_version_delay_s: float = 30.0
    command_timeout_s: float = 5.0

    @property
    def lease_ms(self) -> int:
        return round(self.lease_s * 1000)

    @property
    def liveness_ms(self) -> int:
        """Two leases: a worker whose leases have all lapsed is still listed for a while, never the reverse."""
        return 2 * self.lease_ms
