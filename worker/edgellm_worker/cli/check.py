"""`edgellm-worker check`: everything `serve` does before it reads its first job, and a canary, then out."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping

from edgellm_worker.app import check
from edgellm_worker.cli.options import add_settings, given_flags
from edgellm_worker.config import load_settings
from edgellm_worker.errors import ExitCode
from edgellm_worker.logs import configure_logs


def configure(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    settings, warnings = load_settings(given_flags(arguments), environment)
    configure_logs(settings.log_format)
    for line in [*(f"warning   {warning}" for warning in warnings), *asyncio.run(check(settings))]:
        sys.stdout.write(f"{line}\n")
    return ExitCode.DONE
