"""Log lines: one per event, in text and in JSON, and not to be forged."""

from __future__ import annotations

import io
import json
import logging
from errno import ENOSPC

import pytest
import structlog

from edgellm_producer.wire import Reply, Status
from edgellm_worker.daemon import job_event
from edgellm_worker.logs import LogFormat, configure_logs


@pytest.fixture
def lines() -> io.StringIO:
    return io.StringIO()


def test_text(lines):
    configure_logs(LogFormat.TEXT, stream=lines)
    structlog.get_logger().info("job", job="a-1", status="ok", total_ms=12.5, code=None)
    stamp, _, rest = lines.getvalue().partition(" ")
    assert stamp.endswith("Z")
    assert rest == "info    job job=a-1 status=ok total_ms=12.5 code=null\n"


@pytest.mark.parametrize("form", list(LogFormat))
def test_each_entry_has_its_line(form, lines):
    configure_logs(form, stream=lines)
    structlog.get_logger().info("job", each=[{"job": "a-1"}, {"job": "a-2"}])
    first, second = lines.getvalue().splitlines()
    assert ("a-1" in first, "a-2" in second) == (True, True)
    assert second == first.replace("a-1", "a-2")


class Pipe(io.RawIOBase):
    """What a process writes, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.writes.append(bytes(data))
        return len(data)


@pytest.mark.parametrize(("form", "letter"), [(LogFormat.JSON, "u"), (LogFormat.TEXT, "\u20ac")])
def test_lines_of_several_processes_on_one_pipe_stay_whole(lines, monkeypatch, form, letter):
    """A pipe takes 4096 bytes in one piece: lines go together as long as they fit, and one that does not goes alone."""
    pipe = Pipe()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.BufferedWriter(pipe), "utf-8", line_buffering=True))
    configure_logs(form)
    long = 20
    entries = [{"job": f"a-{number}", "error": letter * (5000 if number == long else 120)} for number in range(40)]
    structlog.get_logger().info("job", each=entries)
    assert all(data.endswith(b"\n") for data in pipe.writes)
    assert [f"a-{long}".encode() in data for data in pipe.writes if len(data) > 4096] == [True]
    assert 3 < len(pipe.writes) < 30
    found = b"".join(pipe.writes).splitlines()
    assert [f"a-{number}".encode() in line for number, line in enumerate(found)] == [True] * 40


def test_json(lines):
    configure_logs(LogFormat.JSON, stream=lines)
    structlog.get_logger().warning("cannot read", error="x", again_in_s=0.1)
    event = json.loads(lines.getvalue())
    assert (event["event"], event["level"], event["again_in_s"]) == ("cannot read", "warning", 0.1)


@pytest.mark.parametrize("form", list(LogFormat))
def test_a_hostile_value_cannot_forge_a_line(form, lines):
    configure_logs(form, stream=lines)
    structlog.get_logger().info("job", error="x\n2026-01-01T00:00:00Z error   engine failed\x1b[2J")
    assert lines.getvalue().count("\n") == 1
    assert "\x1b" not in lines.getvalue()


def test_the_librarys_loggers_join_in(lines):
    configure_logs(LogFormat.TEXT, stream=lines)
    logging.getLogger("edgellm_worker.engine.child").warning("engine process ended: %s", "killed")
    assert "engine process ended: killed source=edgellm_worker.engine.child" in lines.getvalue()


def test_a_jobs_line_holds_no_text():
    reply = Reply(id="a", status=Status.OK, text="the secret recipe")
    assert "recipe" not in str(job_event(reply))


def test_a_log_that_cannot_be_written_loses_lines_and_nothing_else(lines, monkeypatch):
    """A full disk, a terminal that was closed."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(ENOSPC, "No space left on device")

    configure_logs(LogFormat.TEXT)
    monkeypatch.setattr("sys.stderr", Full())
    structlog.get_logger().info("lost")
    monkeypatch.setattr("sys.stderr", lines)
    structlog.get_logger().info("shown")
    assert lines.getvalue().endswith("shown\n")
    assert "lost" not in lines.getvalue()
