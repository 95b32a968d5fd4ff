"""`edgellm-worker serve`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

import structlog

from edgellm_worker.app import serve
from edgellm_worker.cli.options import add_settings, given_flags
from edgellm_worker.config import load_settings
from edgellm_worker.logs import configure_logs


def configure(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    settings, warnings = load_settings(given_flags(arguments), environment)
    configure_logs(settings.log_format)
    log = structlog.get_logger("edgellm_worker.cli")
    for warning in warnings:
        log.warning("unknown variable", detail=warning)
    return asyncio.run(serve(settings, environment))
