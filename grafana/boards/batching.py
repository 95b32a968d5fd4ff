"""Is batching real?"""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Kind, Panel, Query, Unit
from grafana.promql import buckets, gauge, mean, rate
from grafana.shapes import IDLE, quantiles, time

BOARD: Final = Board(
    "edgellm-batching",
    "edgellm / Batching",
    "Is batching real?",
    (
        Panel(
            "Batch size",
            Kind.HEATMAP,
            (Query(buckets("batch_size"), "{{le}}"),),
            "Jobs per admission group. All weight in the lowest band means no batching.",
        ),
        time(
            "Why batches close",
            {"{{reason}}": rate("batch_close_total", by="reason")},
            "full: the wanted case under load. linger: waited for company in vain.",
            unit=Unit.PER_SECOND,
        ),
        time(
            "Mean batch size",
            {"rows per step": mean("step_rows"), "jobs per group": mean("batch_size")},
            "Rows per step is what ran together: with rows joining in flight it passes jobs per group.",
            when_empty=IDLE,
        ),
        time(
            "Slots",
            {"busy": gauge("slots_busy"), "total": gauge("slots_total")},
            "Busy slots are rows that the engine advances in each step.",
        ),
        quantiles(
            "Age of a group when it closes",
            "batch_wait_seconds",
            "Of its oldest job since submit; includes the linger.",
        ),
        time(
            "Engine idle",
            {"{{instance}}": rate("engine_idle_seconds_total", by="instance")},
            "Share of time without any row to advance.",
            unit=Unit.RATIO,
            max_value=1,
        ),
        time(
            "Step time by phase",
            {"{{phase}}": mean("step_duration_seconds", by="phase")},
            "Mean seconds that a step spends in each phase.",
            unit=Unit.SECONDS,
            when_empty=IDLE,
        ),
        time(
            "Where engine time goes",
            {"{{phase}}": rate("step_duration_seconds_sum", by="phase")},
            "Seconds of each phase per second.",
            unit=Unit.RATIO,
        ),
    ),
)
