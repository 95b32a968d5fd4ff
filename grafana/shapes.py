"""Panel shapes and rates that several boards share."""

from __future__ import annotations

from typing import Any, Final

from grafana.panel import AMBER, GREEN, RED, Kind, Panel, Query, Unit
from grafana.promql import quantile, rate, ratio

IDLE: Final = "nothing served in this window"
NO_DRAFTS: Final = "nothing drafted in this window"
NO_DEVICE: Final = "this machine has no such sensor (see telemetry_available)"
HEALTHY_RATIO: Final = ((None, RED), (0.9, AMBER), (0.99, GREEN))
ANY_IS_BAD: Final = ((None, GREEN), (1.0, RED))

FINISHED: Final = rate("request_success_total")
FAILED: Final = rate("request_failure_total")
DRAFTED: Final = rate("spec_decode_num_draft_tokens_total")
ACCEPTED: Final = rate("spec_decode_num_accepted_tokens_total")
DRAFT_STEPS: Final = rate("spec_decode_num_drafts_total")
TOKENS: Final = rate("generation_tokens_total")
STEP_SECONDS: Final = rate("step_duration_seconds_sum")
ACCEPTANCE_LENGTH: Final = f"1 + {ratio(ACCEPTED, DRAFT_STEPS)}"
DRAFT_TIME: Final = rate("step_duration_seconds_sum", match='phase="draft"')


def stat(title: str, expr: str, description: str, **more: Any) -> Panel:
    return Panel(title, Kind.STAT, (Query(expr),), description, **{"width": 4, **more})


def time(title: str, queries: dict[str, str], description: str, **more: Any) -> Panel:
    """`queries` maps legend to expression."""
    listed = tuple(Query(expr, legend) for legend, expr in queries.items())
    return Panel(title, Kind.TIME, listed, description, **more)


def quantiles(title: str, name: str, description: str, unit: Unit = Unit.SECONDS) -> Panel:
    queries = {f"p{q * 100:g}": quantile(q, name) for q in (0.5, 0.95, 0.99)}
    return time(title, queries, description, unit=unit, when_empty=IDLE)
