"""The server that comes along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import redis

from edgellm_worker.embedded import EmbeddedServer, EmbeddedServerError
from tests.support.redis_server import wait_until

CHILD = """
    import sys, time
    from edgellm_worker.embedded import EmbeddedServer
    with EmbeddedServer() as server:
        print(server.socket_path, flush=True)
        time.sleep(60)
"""


def client(path: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(path), decode_responses=True)


def is_there(path: Path) -> bool:
    try:
        with client(path) as one:
            return bool(one.ping())
    except redis.RedisError:
        return False


def test_it_never_evicts_and_is_gone_afterwards() -> None:
    with EmbeddedServer() as server, client(server.socket_path) as one:
        assert one.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert one.config_get("appendonly") == {"appendonly": "yes"}
        path = server.socket_path
    assert not is_there(path)
    assert not path.parent.exists()
    with pytest.raises(EmbeddedServerError):
        server.url  # noqa: B018 - reading it is what is refused


def test_data_survives_a_restart_in_a_directory_of_ones_own(tmp_path: Path) -> None:
    for expected in (1, 2):
        with EmbeddedServer(tmp_path / "data") as server, client(server.socket_path) as one:
            assert one.incr("count") == expected


def test_it_dies_with_a_parent_that_was_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        path = Path(child.stdout.readline().strip())
        assert is_there(path)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        wait_until(lambda: not is_there(path), "the server did not end with its parent")
        wait_until(lambda: not path.parent.exists(), "its folder was not removed")


def test_a_path_with_blanks_and_a_program_that_fails_are_said(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="blanks"):
        EmbeddedServer(tmp_path / "my data").start()
    with pytest.raises(EmbeddedServerError, match="/dev/null/data: Not a directory"):
        EmbeddedServer(Path("/dev/null/data")).start()
    with pytest.raises(EmbeddedServerError, match="did not start"):
        EmbeddedServer(program=Path("/bin/false")).start()
