"""The series, labels and groupings that a PromQL expression names: enough to hold it against an exposition."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SELECTOR = re.compile(r"\b((?:edgellm_\w+)|up)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Selector:
    series: str
    matchers: dict[str, str]


def selectors(expr: str) -> list[Selector]:
    return [Selector(name, dict(_MATCHER.findall(matchers))) for name, matchers in _SELECTOR.findall(expr)]


def groupings(expr: str) -> set[str]:
    return {label.strip() for labels in _GROUPING.findall(expr) for label in labels.split(",") if label.strip()}


def concrete(expr: str) -> str:
    """The expression as Prometheus takes it, Grafana's variables filled in."""
    return expr.replace("$__rate_interval", "1m").replace("$__range", "5m").replace("$instance", ".*")
