"""What tests have to show reaches the terminal, whatever process ran them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_passes(record_property):
    record_property("seen", "shown by a test that passes")
    record_property("other", "not shown")

def test_fails(record_property):
    record_property("seen", "shown by a test that fails")
    raise AssertionError
"""


@pytest.mark.parametrize("flags", [(), ("-p", "xdist.plugin", "-n", "1")], ids=["own process", "another process"])
def test_lines_are_printed_at_the_end(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "test_shown.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.seen", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    _, _, summary = done.stdout.partition("= seen in this run =")
    assert "shown by a test that passes\n" in summary
    assert "shown by a test that fails\n" in summary
    assert "not shown" not in summary
    assert "1 failed, 1 passed" in summary
