"""Who may call, and as which tenant; how long a refused caller should wait."""

from __future__ import annotations

import hmac
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edgellm_producer.errors import QueueFull
from edgellm_producer.keys import NAME_PATTERN

_WINDOW_S: Final = 60.0
_MAX_RETRY_AFTER_S: Final = 60


class AccessFileError(Exception):
    """The key file is wrong; the message names the line."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """API key to tenant. With no keys at all every caller is welcome and has no tenant."""

    tenants: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Lines of ``KEY TENANT``; empty lines and ``#`` comments are skipped."""
        tenants: dict[str, str] = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            if len(words) != 2 or not re.fullmatch(NAME_PATTERN, words[1]) or words[0] in tenants:
                raise AccessFileError(f"{path}:{number}: expected a new KEY and a TENANT ({NAME_PATTERN})")
            tenants[words[0]] = words[1]
        return cls(tenants)

    def is_allowed(self, authorization: str | None) -> bool:
        return not self.tenants or self.tenant(authorization) is not None

    def tenant(self, authorization: str | None) -> str | None:
        """Every key is compared, in constant time each: an attacker learns nothing from how long it took."""
        offered = (authorization or "").removeprefix("Bearer ").strip().encode()
        found = None
        for key, tenant in self.tenants.items():
            if hmac.compare_digest(key.encode(), offered):
                found = tenant
        return found


@dataclass(slots=True)
class Throughput:
    """Answers seen in the last minute: what a full queue's Retry-After is estimated from."""

    _times: deque[float] = field(default_factory=deque)

    def answered(self, now: float) -> None:
        self._times.append(now)
        self._forget(now)

    def retry_after_s(self, full: QueueFull, now: float) -> int:
        """Seconds until the excess has drained at the rate seen here; one second when nothing was seen."""
        self._forget(now)
        if not self._times:
            return 1
        rate = len(self._times) / _WINDOW_S
        excess = full.length - full.limit + 1
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(excess / rate)))

    def _forget(self, now: float) -> None:
        while self._times and now - self._times[0] > _WINDOW_S:
            self._times.popleft()
