"""The line at the bottom of the terminal."""

from __future__ import annotations

import asyncio
import io
import re
import sys

from edgellm_worker.engine.api import EngineLimits
from edgellm_worker.health import HealthSnapshot, WorkerState
from edgellm_worker.statusline import Counts, StatusLine, status_text
from tests.support.daemons import metrics

READY = HealthSnapshot(WorkerState.READY)
LIMITS = EngineLimits(4, 64, 128, 4, 3, 3, 1000)


def test_rates_are_those_of_the_last_interval():
    line = status_text(READY, metrics(LIMITS), Counts(10.0, 100, 30, 10), Counts(12.0, 150, 70, 30))
    assert line == "ready  0/4 slots  0 waiting  25.0 tok/s  drafts accepted 50%"


def test_loading_shows_how_long():
    loading = HealthSnapshot(WorkerState.LOADING)
    assert status_text(loading, None, Counts(1.0, 0, 0, 0), Counts(13.0, 0, 0, 0)) == "loading  12 s"


def test_no_draft_is_no_zero():
    assert status_text(READY, metrics(LIMITS), Counts(0, 0, 0, 0), Counts(1, 5, 0, 0)).endswith("accepted -")


class Terminal(io.StringIO):
    def isatty(self):
        return True


async def test_a_pipe_sees_nothing_and_a_terminal_the_line(monkeypatch):
    for stream, is_shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        status = StatusLine(lambda: READY, lambda: 0.0)
        status.metrics = metrics(LIMITS)
        async with status.shown():
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert bool(re.search("0/4 slots", stream.getvalue())) is is_shown
