"""The demo, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(120)
def test_demo_json_prints_only_the_summary_and_the_numbers_are_good():
    command = [str(Path(sys.executable).with_name("edgellm-worker")), "demo", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    (line,) = ended.stdout.splitlines()
    assert not ended.stderr
    summary = json.loads(line)
    assert (summary["jobs"], summary["ok"], summary["rejected"], summary["cancelled"]) == (24, 22, 1, 1)
    assert summary["failed"] == 0
    assert summary["mean_batch_size"] > 2
    assert summary["draft_acceptance_rate_greedy"] > 0.5
    assert 0 < summary["draft_acceptance_rate"] < 1
    first, *others = summary["acceptance_per_position"]
    assert first > others[-1] > 0
    assert summary["tokens_per_second"] > 0
    assert summary["metrics_url"].startswith("http://127.0.0.1:")
