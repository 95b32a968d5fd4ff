"""Draw every panel from a Prometheus: `python -m grafana.draw --url http://localhost:9090 --out docs/images`.

Not Grafana's own picture, but its queries and its data: one PNG per board. Needs matplotlib, which is no dependency of
the project. It draws what the panels ask, so an empty or senseless panel is seen before Grafana is started.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

from grafana.boards import BOARDS
from grafana.panel import Board, Kind, Panel, Query, Unit

COLUMNS: Final = 2
SCALES: Final = {Unit.RATIO: (100.0, "%"), Unit.BYTES: (1 / 2**20, "MiB"), Unit.HERTZ: (1e-6, "MHz")}


class Source:
    """A time range of one Prometheus. `window` replaces Grafana's rate interval."""

    def __init__(self, url: str, end_s: float, seconds: float, window: str) -> None:
        self._url = url
        self._range = {"start": end_s - seconds, "end": end_s, "step": max(1.0, round(seconds / 150))}
        self._window = window
        self._seconds = seconds

    def series(self, query: Query) -> list[tuple[str, list[float], list[float]]]:
        """(legend, seconds from the start, values) per series."""
        expr = query.expr.replace("$__rate_interval", self._window).replace("$instance", ".*")
        expr = expr.replace("$__range", f"{int(self._seconds)}s")
        parameters = urllib.parse.urlencode({"query": expr, **self._range})
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{parameters}", timeout=30) as response:  # noqa: S310
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        start = self._range["start"]
        return [
            (
                legend(query, found["metric"]),
                [at - start for at, _ in found["values"]],
                [float(value) for _, value in found["values"]],
            )
            for found in result
        ]


def legend(query: Query, labels: dict[str, str]) -> str:
    if not query.legend:
        return ""
    # Ports and hosts of a test machine say nothing in a picture.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], "") if m[1] != "instance" else "worker", query.legend)


def draw_panel(axes: Any, panel: Panel, source: Source) -> None:
    factor, unit = SCALES.get(panel.unit, (1.0, {Unit.NONE: "", Unit.PER_SECOND: "/s"}.get(panel.unit, panel.unit)))
    lines = [line for query in panel.queries for line in source.series(query)]
    shown = f" ({unit})" if unit and not panel.title.endswith(unit) else ""
    axes.set_title(panel.title + shown, fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    if not any(math.isfinite(value) for _, _, values in lines for value in values):
        axes.text(0.5, 0.5, panel.when_empty or "NO DATA", ha="center", va="center", fontsize=7, color="grey")
        axes.set_xticks([]), axes.set_yticks([])
        return
    if panel.kind is Kind.HEATMAP:
        draw_heatmap(axes, lines)
    elif panel.kind is Kind.STATES:
        for row, (name, times, _) in enumerate(lines):
            axes.scatter(times, [row] * len(times), marker="s", s=14)
            axes.text(times[0], row + 0.25, name, fontsize=6)
        axes.set_ylim(-1, len(lines) + 1), axes.set_yticks([])
    else:
        for name, times, values in lines:
            axes.plot(times, [value * factor for value in values], label=name or None, linewidth=1)
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])  # a line at 0 must be seen
        if any(name for name, _, _ in lines):
            axes.legend(fontsize=5, loc="upper left", framealpha=0.6, ncols=2)
    axes.grid(alpha=0.2)


def draw_heatmap(axes: Any, lines: list[tuple[str, list[float], list[float]]]) -> None:
    """Prometheus buckets are cumulative: each band is its bucket less the one below."""
    ordered = sorted(lines, key=lambda line: float(line[0]))
    rows, below = [], [0.0] * max(len(values) for _, _, values in ordered)
    for _, _, values in ordered:
        padded = [0.0] * (len(below) - len(values)) + values
        rows.append([value - lower for value, lower in zip(padded, below, strict=True)])
        below = padded
    used = [index for index, row in enumerate(rows) if any(value > 0 for value in row)]
    low, high = max(0, min(used) - 1), max(used) + 2
    axes.imshow(rows[low:high], origin="lower", aspect="auto", cmap="Oranges", interpolation="nearest")
    names = [name for name, _, _ in ordered[low:high]]
    every = 1 + len(names) // 8
    axes.set_yticks(range(0, len(names), every), [f"≤ {name}" for name in names[::every]])


def draw_board(plot: Any, board: Board, source: Source, path: Path) -> None:
    rows = math.ceil(len(board.panels) / COLUMNS)
    figure, grid = plot.subplots(rows, COLUMNS, figsize=(9, 1.7 * rows), constrained_layout=True)
    figure.suptitle(f"{board.title}: {board.description}", fontsize=10)
    for axes, panel in zip(grid.flat, board.panels, strict=False):
        draw_panel(axes, panel, source)
    for axes in grid.flat[len(board.panels) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=80)
    plot.close(figure)
    from PIL import Image  # noqa: PLC0415 - comes with matplotlib

    Image.open(path).convert("RGB").quantize(160).save(path, optimize=True)


def main() -> int:
    import matplotlib as mpl  # noqa: PLC0415 - only who draws needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:9090")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--window", default="1m", help="in place of Grafana's rate interval")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    source = Source(options.url, time.time(), options.seconds, options.window)
    for board in BOARDS:
        draw_board(plt, board, source, options.out / f"{board.uid}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
