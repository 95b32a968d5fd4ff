"""Do the tests of delivery bite? Each mutant changes one line of the product; every test named beside it must fail.

    python bench/queue_mutants.py [words of a report or a mutant]     run them, on a copy in a temporary directory
    python bench/queue_mutants.py --table                             the tables of docs/reliability.md

The mutants stand in queue_mutants.toml, each with the report from other queues that it brings back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
PARTS = ("producer", "worker", "tests")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` occurs once in the file `path`, or its first occurrence is meant; `tests` are pytest's node ids."""

    kind: str
    report: str
    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def all_mutants() -> list[Mutant]:
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def table(mutants: list[Mutant]) -> str:
    """Markdown, one table per kind."""
    lines = []
    for kind, group in groupby(mutants, key=lambda mutant: mutant.kind):
        lines += [f"**{kind}**", "", "| report | test | the line that breaks it |", "|---|---|---|"]
        for mutant in group:
            tests = ", ".join(f"`{test.rpartition('::')[2]}`" for test in mutant.tests)
            lines.append(f"| {mutant.report} | {tests} | {mutant.name} |")
        lines.append("")
    return "\n".join(lines)


def run(tests: tuple[str, ...], copy: Path, *, is_quiet: bool = True) -> int:
    places = os.pathsep.join(str(copy / part) for part in ("producer", "worker", ""))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=60", "-p", "no:cacheprovider", "-m", "not soak"]
    return subprocess.run(
        [*command, *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL if is_quiet else None,
        check=False,
    ).returncode


def survivors_of(mutant: Mutant, copy: Path) -> list[str]:
    """The tests that do not fail under it."""
    path = copy / mutant.path
    original = path.read_text(encoding="utf-8")
    if mutant.old not in original:
        raise SystemExit(f"{mutant.name}: {mutant.path} has changed, mend {LIST.name}")
    path.write_text(original.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    try:
        return [test for test in mutant.tests if run((test,), copy) != 1]
    finally:
        path.write_text(original, encoding="utf-8")


def main() -> int:
    if sys.argv[1:] == ["--table"]:
        print(table(all_mutants()), end="")
        return 0
    wanted = " ".join(sys.argv[1:])
    mutants = [mutant for mutant in all_mutants() if wanted in mutant.report or wanted in mutant.name]
    num_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in PARTS:
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if run(tuple({test for mutant in mutants for test in mutant.tests}), copy, is_quiet=False) != 0:
            raise SystemExit("the tests fail without any mutant")
        for mutant in mutants:
            survivors = survivors_of(mutant, copy)
            num_survivors += bool(survivors)
            print("SURVIVED" if survivors else "caught  ", mutant.report, "|", mutant.name, *survivors, flush=True)
    print(f"{len(mutants) - num_survivors} of {len(mutants)} caught")
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
