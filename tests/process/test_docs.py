"""The documentation's commands and examples, executed: every block marked `<!-- run -->`, against a live worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_worker import CHECKPOINT, LiveWorker, live_worker
from tests.support.markdown import PAGES, ROOT, Block, blocks

pytestmark = pytest.mark.xdist_group("docs")

RUNNABLE = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(block for block in blocks(page) if block.is_runnable)
]


@pytest.fixture(scope="module")
def worker() -> Iterator[LiveWorker]:
    with live_worker() as running:
        yield running


def here(text: str, worker: LiveWorker) -> str:
    """What a reader would put in: their server, their worker, their model."""
    return (
        text.replace("redis://localhost", worker.redis_url)
        .replace("http://WORKER:9108", worker.metrics_url)
        .replace(" MODEL", f" {CHECKPOINT}")
    )


def environment(worker: LiveWorker) -> dict[str, str]:
    return dict(os.environ) | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "EDGELLM_REDIS_URL": worker.redis_url,
        "OPENBLAS_NUM_THREADS": "1",
    }


def run(command: list[str], worker: LiveWorker, folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(worker), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", RUNNABLE)
def test_block_runs(block: Block, worker: LiveWorker, tmp_path: Path):
    for name in ("grafana", "examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    if block.language == "python":
        run([sys.executable, "-c", here(block.text, worker)], worker, tmp_path)
        return
    assert block.language == "console"
    assert block.commands
    run(["bash", "-euo", "pipefail", "-c", here("\n".join(block.commands), worker)], worker, tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(path: Path, worker: LiveWorker, tmp_path: Path):
    run([sys.executable, str(path)], worker, tmp_path)


def test_pages_have_blocks_that_run():
    assert {block.values[0].page.name for block in RUNNABLE} >= {"README.md", "getting-started.md"}
