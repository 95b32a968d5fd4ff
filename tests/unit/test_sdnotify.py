"""systemd notifications over a real datagram socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edgellm_worker.sdnotify import Notifier


@pytest.fixture
def supervisor(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        yield receiver, str(tmp_path / "notify")


def test_states_of_a_service_life(supervisor):
    receiver, path = supervisor
    notifier = Notifier({"NOTIFY_SOCKET": path})
    notifier.ready("serving tiny on default")
    notifier.alive()
    notifier.status("4 of 4 slots busy")
    notifier.stopping()
    assert [receiver.recv(256) for _ in range(4)] == [
        b"READY=1\nSTATUS=serving tiny on default",
        b"WATCHDOG=1",
        b"STATUS=4 of 4 slots busy",
        b"STOPPING=1\nSTATUS=draining",
    ]


def test_abstract_socket():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0edgellm-test-notify")
        receiver.settimeout(5)
        Notifier({"NOTIFY_SOCKET": "@edgellm-test-notify"}).ready()
        assert receiver.recv(64) == b"READY=1"


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [({}, None), ({"WATCHDOG_USEC": "60000000"}, 30.0), ({"WATCHDOG_USEC": "soon"}, None)],
)
def test_watchdog_interval_is_half_of_what_systemd_allows(environment: dict[str, str], interval_s: float | None):
    assert Notifier(environment).watchdog_interval_s == interval_s


def test_a_missing_or_dead_supervisor_changes_nothing(tmp_path: Path):
    Notifier({}).ready()
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).alive()
