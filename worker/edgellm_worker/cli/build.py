"""`edgellm-worker build MODEL`: what `serve` would build when it starts, ahead of time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Final

from edgellm_worker.cli.options import ENGINE_FIELDS, add_settings, given_flags
from edgellm_worker.config import load_settings
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import build_engine
from edgellm_worker.engines import engine_options
from edgellm_worker.errors import ExitCode
from edgellm_worker.logs import configure_logs

FIELDS: Final = (
    *ENGINE_FIELDS,
    "speculative_config",
    "max_batch_size",
    "max_verify_tree_size",
    "max_draft_tree_size",
    "log_format",
)
"""Settings that a bundle depends on; the others would be read and mean nothing."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder")
    add_settings(parser, FIELDS)


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    settings, _ = load_settings(given_flags(arguments), environment)
    configure_logs(settings.log_format)
    checkpoint = open_checkpoint(settings.model_dir, read_values=False)
    sys.stdout.write(build_engine(settings.engine, checkpoint, engine_options(settings)) + "\n")
    return ExitCode.DONE
