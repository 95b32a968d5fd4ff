"""`edgellm-worker demo`: replies as they come on a terminal, then a summary whose last line is JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgellm_producer.wire import Reply, Status
from edgellm_worker.cli.console import PipeConsole
from edgellm_worker.cli.options import add_settings, given_flags
from edgellm_worker.config import EngineHome, load_settings
from edgellm_worker.demo import TINY_MODEL, DemoJob, data_folder, demo_jobs, run_demo
from edgellm_worker.errors import ExitCode
from edgellm_worker.logs import LogFormat, configure_logs

_FLAGS = ("max_batch_size", "speculative_config", "scheduling", "batch_timeout_ms", "metrics_port")
_COLOURS = {Status.OK: "green", Status.REJECTED: "yellow", Status.CANCELLED: "yellow"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print nothing but the summary's JSON line")
    add_settings(parser, _FLAGS)


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    fixed = {
        "model": data_folder() / TINY_MODEL,
        "engine_home": EngineHome.THREAD,
        "embedded": True,
        "metrics_host": "127.0.0.1",
        "metrics_port": 0,
        "max_input_len": 256,
        "max_kv_cache_capacity": 1024,
    }
    settings, _ = load_settings({**fixed, **given_flags(arguments)}, environment)
    configure_logs(LogFormat.TEXT, level=logging.WARNING)
    console = PipeConsole(quiet=arguments.json)
    jobs = demo_jobs()
    screen = Screen(jobs)
    if console.is_terminal and not arguments.json:
        with Live(screen, console=console, refresh_per_second=8):
            outcome = asyncio.run(run_demo(settings, jobs, screen.show))
    else:
        outcome = asyncio.run(run_demo(settings, jobs, screen.show))
    console.print(_summary_table(outcome))
    sys.stdout.write(json.dumps(outcome) + "\n")
    return ExitCode.DONE


class Screen:
    """One line per job: its label, its state, the end of its text."""

    def __init__(self, jobs: list[DemoJob]) -> None:
        self._lines = [(job.label, "waiting", "", "dim") for job in jobs]

    def show(self, number: int, job: DemoJob, text: str, reply: Reply | None) -> None:
        state, colour = ("running", "cyan") if reply is None else _ending(reply)
        self._lines[number] = (job.label, state, " ".join(text.split())[-70:], colour)

    def __rich__(self) -> Table:
        table = Table(box=None, padding=(0, 1), show_header=False)
        for label, state, text, colour in self._lines:
            table.add_row(label, Text(state, style=colour), Text(text, no_wrap=True, overflow="ellipsis"))
        return table


def _ending(reply: Reply) -> tuple[str, str]:
    code = f" {reply.error.code}" if reply.status is Status.REJECTED and reply.error else ""
    return f"{reply.status}{code}, {reply.usage.completion_tokens} tokens", _COLOURS.get(reply.status, "red")


def _summary_table(outcome: dict[str, Any]) -> Table:
    table = Table(title="edgellm-worker demo", show_header=False, title_justify="left")
    for key, value in outcome.items():
        table.add_row(key.replace("_", " "), json.dumps(value) if isinstance(value, list) else str(value))
    return table
