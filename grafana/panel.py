"""Panels and dashboards as data, and their rendering to Grafana's JSON (schema version 39, Grafana 10 and later).

`Panel.when_empty` is what the panel shows instead of "No data". A query that may rightly return nothing (no device
telemetry on this machine, nothing served yet) must say so there; the tests hold every other query to returning data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

GRID_WIDTH: Final = 24
HEIGHT: Final = {"stat": 4, "row": 1}
DATASOURCE: Final = {"type": "prometheus", "uid": "prometheus"}

GREEN, AMBER, RED = "green", "orange", "red"


class Kind(StrEnum):
    STAT = "stat"
    TIME = "timeseries"
    HEATMAP = "heatmap"
    STATES = "state-timeline"


class Unit(StrEnum):
    """Grafana's unit ids that the boards use."""

    NONE = "short"
    RATIO = "percentunit"
    SECONDS = "s"
    BYTES = "bytes"
    WATTS = "watt"
    JOULES = "joule"
    CELSIUS = "celsius"
    HERTZ = "hertz"
    PER_SECOND = "ops"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series (`{{label}}` is replaced by the label's value)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`width` is in 24ths of a row. `steps` are (from value, colour), the first from None."""

    title: str
    kind: Kind
    queries: tuple[Query, ...]
    description: str
    unit: Unit = Unit.NONE
    width: int = 12
    steps: tuple[tuple[float | None, str], ...] = ((None, GREEN),)
    when_empty: str = ""
    max_value: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def _targets(panel: Panel) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + index),
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "datasource": DATASOURCE,
            "format": "heatmap" if panel.kind is Kind.HEATMAP else "time_series",
            "range": True,
        }
        for index, query in enumerate(panel.queries)
    ]


_LEGEND: Final = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_OPTIONS: Final[dict[Kind, dict[str, Any]]] = {
    Kind.STAT: {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    Kind.TIME: {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    Kind.HEATMAP: {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
        "yAxis": {"axisPlacement": "left", "reverse": False},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False},
    },
    Kind.STATES: {
        "mergeValues": True,
        "showValue": "auto",
        "alignValue": "left",
        "rowHeight": 0.9,
        "legend": _LEGEND,
        "tooltip": {"mode": "single", "sort": "none"},
    },
}
_CUSTOM: Final[dict[Kind, dict[str, Any]]] = {
    Kind.TIME: {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False},
}


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit.value,
        "min": 0,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": color} for value, color in panel.steps],
        },
        "custom": _CUSTOM.get(panel.kind, {}),
    }
    if panel.max_value is not None:
        defaults["max"] = panel.max_value
    if panel.when_empty:
        defaults["noValue"] = panel.when_empty
    return defaults


def _panel_json(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": grid,
        "targets": _targets(panel),
        "options": _OPTIONS[panel.kind],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
    }


def _placed(panels: Sequence[Panel]) -> Iterator[tuple[Panel, dict[str, int]]]:
    """Left to right, a new row where the next panel does not fit; a row is as high as its highest panel."""
    x = y = row_height = 0
    for panel in panels:
        height = HEIGHT.get(panel.kind.value, 8)
        if x + panel.width > GRID_WIDTH:
            x, y, row_height = 0, y + row_height, 0
        yield panel, {"x": x, "y": y, "w": panel.width, "h": height}
        x += panel.width
        row_height = max(row_height, height)


_INSTANCE_VARIABLE: Final[dict[str, Any]] = {
    "name": "instance",
    "label": "Worker",
    "type": "query",
    "datasource": DATASOURCE,
    "query": "label_values(edgellm_build_info, instance)",
    "refresh": 2,
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"selected": True, "text": "All", "value": "$__all"},
    "sort": 1,
}


def render(board: Board) -> dict[str, Any]:
    """The dashboard's JSON as Grafana's file provider loads it."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["edgellm"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_INSTANCE_VARIABLE]},
        "annotations": {"list": []},
        "links": [
            {
                "title": "edgellm",
                "type": "dashboards",
                "tags": ["edgellm"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "icon": "external link",
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
        "panels": [
            _panel_json(panel, number, grid) for number, (panel, grid) in enumerate(_placed(board.panels), start=1)
        ],
    }
