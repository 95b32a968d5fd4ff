"""Fixtures for every suite."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

# How long it takes to draw an input is the machine's business: with a process per core another one may hold it up.
hypothesis.settings.register_profile("shared", suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the suite's processes share the cores; numpy is not loaded yet

pytest_plugins = ("tests.support.redis_server", "tests.support.seen")


@pytest.fixture(autouse=True)
def logs_of_its_own() -> Iterator[None]:
    """The command line configures the logs of its whole process: whoever calls it in here leaves them as they were, or
    the next test that looks at them would see nothing, whichever that is.
    """
    before, bridge = structlog.get_config(), logging.getLogger("edgellm_worker")
    kept = bridge.handlers, bridge.level, bridge.propagate
    yield
    structlog.configure(**before)
    bridge.handlers, _, bridge.propagate = kept
    bridge.setLevel(kept[1])  # not by assignment: what it remembers of levels is forgotten
