"""Telling systemd how it goes: one datagram per message to the socket it names (sd_notify(3)).

    READY=1      serving                        (Type=notify)
    STATUS=...   shown by `systemctl status`
    WATCHDOG=1   alive; due within WATCHDOG_USEC (WatchdogSec=)
    STOPPING=1   draining

Outside systemd there is no socket and every call does nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """`environment` is the process's; reading it is the caller's act, so that nothing here is ambient."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of Linux's abstract namespace.
        self._address = "\0" + name[1:] if name.startswith("@") else name
        microseconds = environment.get("WATCHDOG_USEC", "")
        self.watchdog_interval_s: float | None = int(microseconds) / 2e6 if microseconds.isdigit() else None
        """Half the time systemd allows between two signs of life, or None when it watches for none."""

    def ready(self, status: str = "") -> None:
        self._send("READY=1", status)

    def status(self, status: str) -> None:
        self._send("", status)

    def alive(self) -> None:
        """Call at least every `watchdog_interval_s`, and only while jobs make progress."""
        self._send("WATCHDOG=1", "")

    def stopping(self, status: str = "draining") -> None:
        self._send("STOPPING=1", status)

    def _send(self, state: str, status: str) -> None:
        if not self._address:
            return
        lines = [line for line in (state, f"STATUS={status}" if status else "") if line]
        # The supervisor may be gone or its socket full: neither is a reason to stop serving.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)
