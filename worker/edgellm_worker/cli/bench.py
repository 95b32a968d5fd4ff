"""`edgellm-worker bench [MODEL]`: a table of tokens/s, acceptance and step time over batch sizes and draft lengths."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from edgellm_producer.shell import explained
from edgellm_worker.bench import (
    Cell,
    CellSummary,
    Spread,
    SweepPlan,
    SweepResult,
    bench_requests,
    drafts_name,
    read_batch_sizes,
    read_drafts,
    sweep,
)
from edgellm_worker.cli.console import PipeConsole
from edgellm_worker.cli.options import ENGINE_FIELDS, add_settings, given_flags
from edgellm_worker.config import Settings, load_settings
from edgellm_worker.demo import TINY_MODEL, data_folder, demo_jobs
from edgellm_worker.engine.api import Engine
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import load_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engines import engine_options
from edgellm_worker.errors import ConfigError, ExitCode
from edgellm_worker.logs import LogFormat, configure_logs
from edgellm_worker.tokenizer import Tokenizer

CLOCKS: Final = {"wall": time.perf_counter, "cpu": time.thread_time}
ALL_DRAFTS: Final = "0,1,3,5,adaptive"
COLUMNS: Final = ("batch", "drafts", "decode tokens/s", "tokens/s", "accepted", "step ms", "x serialized", "x plain")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="checkpoint folder (default: the bundled tiny one)")
    parser.add_argument("--batch-sizes", metavar="LIST", default="1,2,4,8", help="default: 1,2,4,8; 1 is always run")
    parser.add_argument("--drafts", metavar="LIST", help=f"default: {ALL_DRAFTS}, as far as the engine does them")
    parser.add_argument("--repeats", metavar="N", type=int, default=5, help="runs of each cell (default: 5)")
    parser.add_argument("--tokens", metavar="N", type=int, default=64, help="most tokens of a request (default: 64)")
    parser.add_argument("--requests", metavar="N", type=int, default=16, help="requests of a run (default: 16)")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="a prompt per line (default: the demo's)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: this thread's own time, for an engine on the CPU of a busy machine (default: wall)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_settings(parser, ENGINE_FIELDS)


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    flags = given_flags(arguments)
    flags["model"] = flags.get("model") or str(data_folder() / TINY_MODEL)
    settings, _ = load_settings(flags, environment)
    configure_logs(LogFormat.TEXT, level=logging.WARNING)
    plan = _plan(arguments)
    texts = _texts(arguments.prompts)
    checkpoint = open_checkpoint(settings.model_dir)
    options = replace(engine_options(settings), max_batch_size=plan.max_batch_size)

    def open_engine(drafting: SpeculativeConfig) -> Engine:
        return load_engine(settings.engine, checkpoint, replace(options, speculative=drafting))

    requests = bench_requests(Tokenizer(settings.model_dir), texts, arguments.requests, arguments.tokens)
    result = sweep(plan, open_engine, requests, CLOCKS[arguments.clock], _show_progress)
    if arguments.json:
        sys.stdout.write(json.dumps(_document(arguments, settings, result), indent=1) + "\n")
    else:
        _print(result)
    unmet = {} if arguments.drafts is None else result.left_out
    for name, reason in unmet.items():
        sys.stderr.write(f"edgellm-worker: --drafts {name}: {reason}\n")
    return ExitCode.OPERATOR if unmet else ExitCode.DONE


def _plan(arguments: argparse.Namespace) -> SweepPlan:
    """Raises `ConfigError` with everything that is wrong."""
    problems = [
        f"--{name}: {value} is not a positive number"
        for name, value in (
            ("repeats", arguments.repeats),
            ("tokens", arguments.tokens),
            ("requests", arguments.requests),
        )
        if value < 1
    ]
    lists: dict[str, Any] = {}
    given = {"batch-sizes": arguments.batch_sizes, "drafts": arguments.drafts or ALL_DRAFTS}
    for (name, text), read in zip(given.items(), (read_batch_sizes, read_drafts), strict=True):
        try:
            lists[name] = read(text)
        except ValueError as error:
            problems.append(f"--{name}: {error}")
    if problems:
        raise ConfigError(problems)
    return SweepPlan(lists["batch-sizes"], lists["drafts"], arguments.repeats)


def _texts(file: Path | None) -> Sequence[str]:
    """Raises `ConfigError` for a file that cannot be read or has no prompt."""
    if file is None:
        return [job.fields["messages"][0]["content"] for job in demo_jobs() if "messages" in job.fields]
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        words = explained(error) if isinstance(error, OSError) else f"{file}: {error}"
        raise ConfigError([f"--prompts: {words}"]) from error
    if not lines:
        raise ConfigError([f"--prompts: {file} holds no prompt"])
    return lines


def _show_progress(repeat: int, cell: Cell) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rrepeat {repeat + 1}, batch {cell.batch_size}, drafts {drafts_name(cell.drafting):10}\r")


def _document(arguments: argparse.Namespace, settings: Settings, result: SweepResult) -> dict[str, Any]:
    return {
        "model": settings.model_dir.name,
        "engine": settings.engine,
        "clock": arguments.clock,
        "repeats": arguments.repeats,
        "requests": arguments.requests,
        "max_tokens": arguments.tokens,
        "num_different_texts": result.num_different_texts,
        "left_out": dict(result.left_out),
        "cells": [asdict(summary) for summary in result.summaries()],
    }


def _print(result: SweepResult) -> None:
    rows = [_row(summary) for summary in result.summaries()]
    console = PipeConsole()
    if console.is_terminal:
        table = Table(*COLUMNS, title="median (smallest to largest)", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in plain_table(COLUMNS, rows)))
    for name, reason in result.left_out.items():
        sys.stdout.write(f"drafts {name} left out: {reason}\n")
    different = result.num_different_texts
    sys.stdout.write(
        f"{different} requests got different texts\n" if different else "every request got the same text in all runs\n"
    )


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned, two blanks between columns."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [tuple(columns), *rows]
    ]


def _row(summary: CellSummary) -> tuple[str, ...]:
    return (
        str(summary.batch_size),
        summary.drafts,
        _shown(summary.decode_tokens_per_s, 1),
        _shown(summary.tokens_per_s, 1),
        f"{summary.acceptance.median:.3f}" if summary.drafts != "0" else "-",
        _shown(summary.mean_step_ms, 2),
        _shown(summary.over_serialized, 2),
        "-" if summary.over_plain is None else _shown(summary.over_plain, 2),
    )


def _shown(spread: Spread, decimals: int) -> str:
    return f"{spread.median:.{decimals}f} ({spread.least:.{decimals}f} to {spread.most:.{decimals}f})"
