"""The whole way of `--engine edgellm`: build in a child, load in a child, a job answered; the vendor's part is fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.edgellm_fake_wheel import told, write_fake_wheel
from tests.support.edgellm_setup import MODEL_DIR

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    wheel = write_fake_wheel(tmp_path / "wheel")
    path = os.pathsep.join(map(str, (wheel, ROOT, ROOT / "worker", ROOT / "producer")))
    return {**os.environ, "PYTHONPATH": path, "FAKE_EDGELLM": told(kv="fp16"), "OPENBLAS_NUM_THREADS": "1"}


def edgellm_worker(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from edgellm_worker.cli import main; raise SystemExit(main())", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_build_then_check(tmp_path: Path, environment: dict[str, str]) -> None:
    options = ["--engine", "edgellm", "--cache-dir", str(tmp_path / "cache")]
    options += ["--max-input-len", "64", "--max-kv-cache-capacity", "128"]
    built = edgellm_worker(environment, "build", str(MODEL_DIR), *options)
    assert (built.returncode, built.stderr) == (0, "")
    assert "KV cache fp16; hidden state between drafts: corrected" in built.stdout
    again = edgellm_worker(environment, "build", str(MODEL_DIR), *options)
    assert "(from the cache)" in again.stdout

    checked = edgellm_worker(
        environment, "check", "--model", str(MODEL_DIR), "--embedded", "--metrics-port", "0", *options
    )
    assert checked.returncode == 0, checked.stderr
    assert "engine    edgellm: drafting mtp, 4 rows of 126 tokens" in checked.stdout
    assert "canary    16 tokens" in checked.stdout


@pytest.mark.parametrize("command", ["build", "check"])
def test_a_cache_that_cannot_be_written_is_a_failed_build_in_one_line(
    environment: dict[str, str], command: str
) -> None:
    model = [str(MODEL_DIR)] if command == "build" else ["--model", str(MODEL_DIR), "--embedded"]
    failed = edgellm_worker(environment, command, *model, "--engine", "edgellm", "--cache-dir", "/dev/null/cache")
    assert failed.returncode == 4
    assert failed.stderr == "edgellm-worker: /dev/null/cache: Not a directory\n"


def test_a_build_that_fails_exits_with_the_vendors_reason(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["FAKE_EDGELLM"] = told(crash="no plugin library")
    failed = edgellm_worker(
        environment, "build", str(MODEL_DIR), "--engine", "edgellm", "--cache-dir", str(tmp_path / "cache")
    )
    assert failed.returncode == 4
    assert "no plugin library" in failed.stderr
