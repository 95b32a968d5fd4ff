"""What a test has to show a person: `record_property("seen", line)`, printed at the end of the run.

The processes of pytest-xdist have no terminal; properties of a report reach the one that has.
"""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    lines = [
        line for report in reports if report.when == "call" for name, line in report.user_properties if name == "seen"
    ]
    if lines:
        terminalreporter.section("seen in this run")
        terminalreporter.write_line("\n".join(map(str, lines)))
