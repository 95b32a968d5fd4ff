"""Fixtures for every suite."""

pytest_plugins = ("tests.support.redis_server",)
