"""The alert rules: names exist, each has a case in promtool's rule test and a part in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from edgellm_producer.wire import ErrorCode
from edgellm_worker.metrics.definitions import DEFINITIONS
from tests.support.exposition import SERIES, TARGET_LABELS
from tests.support.promql import groupings, selectors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "grafana" / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
CASES = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


@each_rule
def test_rule_names_exist(rule: dict):
    for selector in selectors(rule["expr"]):
        labels = SERIES.get(selector.series, TARGET_LABELS if selector.series == "up" else None)
        assert labels is not None, f"{selector.series} is not exported"
        assert selector.matchers.keys() <= labels
    assert groupings(rule["expr"]) <= {"instance", "priority"}


@each_rule
def test_rule_fires_in_a_case_and_stays_silent_on_a_healthy_worker(rule: dict):
    checks = [(case["name"], check) for case in CASES for check in case["alert_rule_test"]]
    of_rule = [(name, check) for name, check in checks if check["alertname"] == rule["alert"]]
    assert any(check["exp_alerts"] for _, check in of_rule)
    assert any(name == "a healthy worker fires nothing" and not check["exp_alerts"] for name, check in of_rule)


@each_rule
def test_rule_has_its_part_of_the_runbook(rule: dict):
    path, anchor = rule["annotations"]["runbook"].split("#")
    headings = re.findall(r"^## (\S+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings


def test_the_runbook_has_no_part_without_a_rule():
    headings = re.findall(r"^## (\S+)$", (ROOT / "docs/runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]


def test_codes_in_rules_are_codes_of_the_wire():
    codes = {c for rule in RULES for s in selectors(rule["expr"]) for c in s.matchers.get("code", "").split("|") if c}
    assert codes
    assert codes <= set(ErrorCode)


def test_cases_feed_only_series_that_exist():
    names = {s.series for case in CASES for given in case["input_series"] for s in selectors(given["series"])}
    assert names <= {definition.full_name for definition in DEFINITIONS} | {"up"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: rules not evaluated")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "prometheus.yml"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_promtool(arguments: list[str]):
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
