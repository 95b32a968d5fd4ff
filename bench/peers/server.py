"""A socket's worth of RESP: the measuring side speaks to Redis itself, so that it is the same for every peer."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Self

NUM_ASKED = 256


class Server:
    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._socket.close()

    def __call__(self, *words: str | int) -> Any:
        parts = [str(word).encode() for word in words]
        packed = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        self._socket.sendall(b"*%d\r\n%s" % (len(parts), packed))
        return self._read()

    def _read(self) -> Any:
        line = self._file.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind == b"+":
            return rest.decode()
        count = int(rest)
        if kind == b":" or count < 0:
            return count
        if kind == b"*":
            return [self._read() for _ in range(count)]
        return self._file.read(count + 2)[:-2]

    def cpu_s(self) -> float:
        """User and system seconds that the server has used."""
        told = dict(line.split(":") for line in self("INFO", "cpu").decode().split("\r\n") if ":" in line)
        return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])

    def without(self, keys: list[str]) -> list[str]:
        """The keys less a leading run of those that exist: one command, so that polling costs the same for all."""
        head = keys[:NUM_ASKED]
        return keys[len(head) :] if head and self("EXISTS", *head) == len(head) else keys
