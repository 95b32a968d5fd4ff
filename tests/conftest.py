"""Fixtures for every suite."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the suite's processes share the cores; numpy is not loaded yet

pytest_plugins = ("tests.support.redis_server", "tests.support.seen")
