"""Imports point one way: cli -> app -> daemon -> {queue, batching, tokenizer, metrics} -> producer.wire."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "worker" / "edgellm_worker"
MODULES = sorted(WORKER.rglob("*.py"))

ONLY_IN = {
    "prometheus_client": ("metrics/",),
    "redis": ("queue/",),
    "structlog": ("app.py", "daemon.py", "logs.py", "outbox.py", "reader.py", "rows.py", "cli/"),
    "rich": ("cli/", "statusline.py"),
    "edgellm_worker.cli": ("cli/",),
    "edgellm_worker.app": ("cli/", "demo.py"),
    "edgellm_worker.daemon": ("app.py", "demo.py"),
    "edgellm_worker.metrics": ("metrics/", "app.py", "daemon.py", "demo.py", "rows.py", "statusline.py"),
    "edgellm_worker.queue.redis_queue": ("queue/", "app.py"),
}
CORE = ("batching.py", "daemon.py", "jobs.py", "outbox.py", "reader.py", "retry.py", "rows.py", "running.py")
CORE_SEES_OF_ENGINE = {"edgellm_worker.engine.api", "edgellm_worker.engine.errors"}
CORE_SEES_OF_QUEUE = {"edgellm_worker.queue.api", "edgellm_worker.queue.errors"}


def imported(path: Path) -> set[str]:
    """The modules that a file imports at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_only_the_named_places_import(package):
    strangers = [
        str(path.relative_to(WORKER))
        for path in MODULES
        if any(inside(name, package) for name in imported(path))
        and not str(path.relative_to(WORKER)).startswith(ONLY_IN[package])
    ]
    assert not strangers


@pytest.mark.parametrize("name", CORE)
def test_the_daemon_sees_only_the_seams(name):
    seen = imported(WORKER / name)
    assert {n for n in seen if inside(n, "edgellm_worker.engine")} <= CORE_SEES_OF_ENGINE
    assert {n for n in seen if inside(n, "edgellm_worker.queue")} <= CORE_SEES_OF_QUEUE


def test_no_package_marker_beside_the_packages():
    """An __init__.py there would make a second copy of every class."""
    assert not (ROOT / "worker" / "__init__.py").exists()
    assert not (ROOT / "producer" / "__init__.py").exists()


def test_the_loop_reads_aloud():
    tree = ast.parse((WORKER / "daemon.py").read_text(encoding="utf-8"))
    (run,) = [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == "run"]
    assert (run.end_lineno or 0) - run.lineno <= 15
