"""The dashboards: current, valid for Grafana, and asking only for what the worker exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from edgellm_worker.metrics.definitions import DEFINITIONS, Kind
from grafana import build
from grafana.boards import BOARDS
from grafana.panel import Board, Panel, Query, render
from grafana.panel import Kind as PanelKind
from tests.support.exposition import SERIES
from tests.support.promql import concrete, groupings, selectors

ALERTS = Path(build.__file__).parent / "prometheus" / "alerts.yml"
QUERIES = [
    pytest.param(board, panel, query, id=f"{board.uid}-{panel.title}-{index}")
    for board in BOARDS
    for panel in board.panels
    for index, query in enumerate(panel.queries)
]
QUEUE_WIDE = {d.full_name for d in DEFINITIONS if "Queue-wide" in d.help}
SHOWN_ELSEWHERE = {
    "edgellm_cache_config_info": "labels for joins, nothing to plot",
    "edgellm_kv_cache_usage_ratio": "the same number as kv_cache_usage_perc",
    "edgellm_build_info": "feeds the worker variable",
}


def test_committed_json_is_what_the_boards_say():
    assert build.stale() == [], "run python -m grafana.build"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafanas_own_models_know_every_key(board: Board):
    """A key that the schema lacks is dropped by its models, so what comes back must contain what went in."""
    register_default_plugins()
    raw = json.loads(build.path_of(board).read_text(encoding="utf-8"))
    back = json.loads(json.dumps(Dashboard.from_json(raw), cls=JSONEncoder))
    assert _lost(raw, back) == []


def _lost(raw: object, back: object, path: str = "") -> list[str]:
    if isinstance(raw, dict) and isinstance(back, dict):
        return [line for key, value in raw.items() for line in _lost(value, back.get(key), f"{path}.{key}")]
    if isinstance(raw, list) and isinstance(back, list) and len(raw) == len(back):
        return [line for i, pair in enumerate(zip(raw, back, strict=True)) for line in _lost(*pair, f"{path}[{i}]")]
    return [] if raw == back else [f"{path}: {raw!r} became {back!r}"]


@pytest.mark.parametrize(("board", "panel", "query"), QUERIES)
def test_query_names_exist(board: Board, panel: Panel, query: Query):
    found = selectors(query.expr)
    assert found, query.expr
    known: set[str] = set()
    for selector in found:
        assert selector.series in SERIES, f"{selector.series} is not exported"
        assert selector.matchers.keys() <= SERIES[selector.series], query.expr
        known |= SERIES[selector.series]
    assert groupings(query.expr) <= known, query.expr
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= groupings(query.expr), query.legend


@pytest.mark.parametrize(("board", "panel", "query"), QUERIES)
def test_queue_wide_gauges_are_never_added_up_over_workers(board: Board, panel: Panel, query: Query):
    for selector in selectors(query.expr):
        if selector.series in QUEUE_WIDE:
            assert re.search(rf"max[^(]*(\([^)]*\)\s*)?\({selector.series}\b", query.expr), query.expr
            assert "instance" not in selector.matchers


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_do_not_overlap_and_have_unique_titles(board: Board):
    grids = [panel["gridPos"] for panel in render(board)["panels"]]
    cells = [(x, y) for g in grids for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])]
    assert len(cells) == len(set(cells))
    assert all(g["x"] + g["w"] <= 24 for g in grids)
    titles = [panel.title for panel in board.panels]
    assert len(titles) == len(set(titles))


def test_every_metric_is_on_a_board():
    shown = {s.series for board in BOARDS for panel in board.panels for q in panel.queries for s in selectors(q.expr)}
    suffix = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    missing = {d.full_name for d in DEFINITIONS if not shown & {d.full_name + s for s in suffix.get(d.kind, ("",))}}
    assert missing == SHOWN_ELSEWHERE.keys()


def test_a_quotient_that_can_be_nan_says_what_it_shows_then():
    silent = [
        f"{board.uid}: {panel.title}"
        for board in BOARDS
        for panel in board.panels
        if panel.kind is not PanelKind.HEATMAP and not panel.when_empty
        if any("histogram_quantile" in q.expr or " / " in q.expr for q in panel.queries)
    ]
    assert silent == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: PromQL syntax not checked")
def test_promtool_accepts_every_query(tmp_path: Path):
    rules = [
        {"record": f"query:{index}", "expr": concrete(query.expr)}
        for index, query in enumerate(q for b in BOARDS for p in b.panels for q in p.queries)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
