"""`edgellm-worker inspect MODEL`: what a checkpoint is, what decided it, what is wrong, and whether it can run.

Exit code 0 when it can run, 2 (the operator's) when it cannot. `--json` prints the whole report; the tables show
modules that differ in their layer number alone as one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from edgellm_producer.shell import expanded, explained
from edgellm_worker.cli.console import PipeConsole
from edgellm_worker.engine.checkpoint.folder import TOKENIZER_FILES
from edgellm_worker.engine.checkpoint.report import CheckpointReport, ModuleReport, report_checkpoint
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.errors import ConfigError, ExitCode
from edgellm_worker.tokenizer import Tokenizer

PIPE_WIDTH: Final = 120
MAX_LISTED: Final = 12

_LAYER = re.compile(r"^layers\.(\d+)\.")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="checkpoint folder (Hugging Face layout)")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument(
        "--headers-only",
        action="store_true",
        help="read neither the weights (for NaN and infinity) nor the tokenizer: quick on huge files",
    )


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:  # noqa: ARG001 - every command gets it
    try:
        path = expanded(arguments.model)
    except OSError as error:
        raise ConfigError([explained(error)]) from error
    report = report_checkpoint(path, read_values=not arguments.headers_only)
    if not arguments.headers_only:
        report = _with_tokenizer(report, path)
    if arguments.json:
        document = {**dataclasses.asdict(report), "can_run": report.can_run}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        console = PipeConsole()
        if not console.is_terminal:
            console = PipeConsole(width=PIPE_WIDTH)
        for part in (_summary(report), _namespaces(report), _modules(report), _mtp(report), _endings(report)):
            if part is not None:
                console.print(part)
    return ExitCode.DONE if report.can_run else ExitCode.OPERATOR


def _with_tokenizer(report: CheckpointReport, path: Path) -> CheckpointReport:
    """The report, and what of the tokenizer's files cannot be used, where nothing is said of those files yet."""
    if TOKENIZER_FILES[0] not in report.tokenizer_files:
        return report
    try:
        Tokenizer(path)
    except CheckpointError as error:
        found = [problem.removeprefix(f"{path}/") for problem in error.problems]
        named = {problem.partition(":")[0] for problem in report.problems}
        new = [problem for problem in found if problem.partition(":")[0] not in named]
        if new:
            obstacles = (*report.obstacles, "its tokenizer cannot be used")
            return dataclasses.replace(report, problems=(*report.problems, *new), obstacles=obstacles)
    return report


def _summary(report: CheckpointReport) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = {
        "checkpoint": report.path,
        "architecture": f"{report.architecture} ({report.model_type}), {report.num_layers} layers",
        "parameters": f"{report.num_parameters:,}",
        "files": f"{_listed(report.files)}: {report.num_tensors} tensors, {_bytes(report.num_bytes)}",
        "quantization": " over ".join(report.quantization_files) or "no config speaks of it; the files decide",
        "tokenizer": _listed(report.tokenizer_files),
        "MTP": "present" if report.mtp else "none: nothing is drafted",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _namespaces(report: CheckpointReport) -> Table | None:
    if not report.namespaces:
        return None
    table = _table("Namespaces", ("namespace", "prefix", "tensors", "parameters", "size", "KV cache", "why"))
    for one in report.namespaces:
        numbers = (str(one.num_tensors), f"{one.num_parameters:,}", _bytes(one.num_bytes))
        _add_row(table, (one.namespace, one.prefix or "(none)", *numbers, one.kv_cache, one.kv_reason))
    return table


def _modules(report: CheckpointReport) -> Table | None:
    """One line for the modules of all layers that are stored alike."""
    if not report.modules:
        return None
    groups: dict[tuple[str, ...], list[ModuleReport]] = {}
    for module in report.modules:
        name = _LAYER.sub("layers.N.", module.name)
        key = (module.namespace, name, module.form, module.claimed or "-", module.decided_by)
        groups.setdefault(key, []).append(module)
    table = _table("Modules", ("namespace", "module", "layers", "stored as", "config says", "decided by"))
    for (namespace, name, form, claimed, decided_by), members in groups.items():
        layers = _ranges(int(match[1]) for member in members if (match := _LAYER.match(member.name)))
        _add_row(table, (namespace, name, layers or "-", form, claimed, decided_by))
    return table


def _mtp(report: CheckpointReport) -> Table | None:
    if not report.mtp:
        return None
    table = _table("MTP tensors", ("tensor", "resolves in", "stored as", "file"))
    for place in report.mtp:
        _add_row(table, (place.name, place.namespace, place.stored_as, place.file))
    return table


def _endings(report: CheckpointReport) -> Text:
    """Ignored tensors, notes, problems, and the verdict."""
    text = Text()
    if report.ignored:
        text.append(f"\nignored (not the text model): {len(report.ignored)} tensors: {_listed(report.ignored)}\n")
    for note in report.notes:
        text.append("\nnote: ", style="yellow").append(note)
    for problem in report.problems:
        text.append("\nproblem: ", style="red").append(problem)
    verdict = "yes" if report.can_run else "no: " + "; ".join(report.obstacles)
    text.append("\n\ncan run: ", style="bold").append(verdict, style="green" if report.can_run else "red")
    return text


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Table, cells: Iterable[str]) -> None:
    """As text: a bracket in a tensor's name is no markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _ranges(numbers: Iterable[int]) -> str:
    """0-2,4-6,8"""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _listed(names: Sequence[str]) -> str:
    rest = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + rest or "none"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
