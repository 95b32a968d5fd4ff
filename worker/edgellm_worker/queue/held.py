"""The table of deliveries in memory: what this process holds, for the lease keeper's thread and the event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple


class Entry(NamedTuple):
    """A stream entry of a lane and the job it carries."""

    lane: str
    entry_id: str
    job_id: str


class HeldTable:
    """Thread-safe. An entry is here from the read until its finish, release or retry was confirmed, or it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], Entry] = {}
        self._ids: set[str] = set()
        self._lost: set[str] = set()
        self._cancelled: set[str] = set()

    def __contains__(self, key: tuple[str, str]) -> bool:
        with self._lock:
            return key in self._entries

    def snapshot(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._entries[entry[:2]] = entry
            self._ids.add(entry.job_id)

    def remove(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                if self._entries.pop(entry[:2], None) is not None:
                    self._ids.discard(entry.job_id)
                    self._lost.discard(entry.job_id)
                    self._cancelled.discard(entry.job_id)

    def mark_lost(self, job_ids: Iterable[str]) -> None:
        """The entries go at once: renewing what another worker owns would be wrong from here on."""
        with self._lock:
            gone = self._ids & set(job_ids)
            self._lost |= gone
            self._ids -= gone
            self._entries = {key: entry for key, entry in self._entries.items() if entry.job_id not in gone}

    def mark_cancelled(self, job_ids: Iterable[str]) -> bool:
        """True when one of them is held here."""
        with self._lock:
            mine = self._ids & set(job_ids)
            self._cancelled |= mine
            return bool(mine)

    def drain_lost(self) -> set[str]:
        with self._lock:
            lost, self._lost = self._lost, set()
            return lost

    def drain_cancelled(self) -> set[str]:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            return cancelled


class ReplyClock:
    """When Redis last answered anything. Written by two threads: one float, so no lock is needed."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def touch(self) -> None:
        self._at = time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at
