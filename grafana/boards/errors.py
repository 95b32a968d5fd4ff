"""What goes wrong, and whose fault is it?"""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Unit
from grafana.promql import increase, rate, ratio, shared
from grafana.shapes import ANY_IS_BAD, FAILED, FINISHED, IDLE, stat, time

BOARD: Final = Board(
    "edgellm-errors",
    "edgellm / Errors",
    "What goes wrong, and whose fault is it?",
    (
        stat("Dead letters", shared("queue_dead"), "`edgellm-producer dead list` shows them.", steps=ANY_IS_BAD),
        stat("Engine restarts", increase("engine_restarts_total"), "In the time range.", steps=ANY_IS_BAD),
        stat("Engine hangs", increase("engine_hangs_total"), "Killed by the watchdog.", steps=ANY_IS_BAD),
        stat("Jobs reclaimed", increase("jobs_reclaimed_total"), "A worker vanished with jobs.", steps=ANY_IS_BAD),
        stat("Retries", f"sum ({increase('job_retries_total')})", "Jobs put back.", steps=ANY_IS_BAD),
        stat("Redis reconnects", increase("redis_reconnects_total"), "In the time range.", steps=ANY_IS_BAD),
        time(
            "Answers without text, by code",
            {"{{code}}": f"{rate('request_failure_total', by='code')} > 0"},
            "engine_error, too_many_attempts and poison are the fleet's fault, the others the caller's.",
            unit=Unit.PER_SECOND,
            when_empty="every answer was text",
        ),
        time(
            "Share of answers without text",
            {"share": ratio(FAILED, f"({FINISHED} + {FAILED})")},
            "Refused, failed, expired and cancelled jobs over all answers.",
            unit=Unit.RATIO,
            max_value=1,
            when_empty=IDLE,
        ),
        time(
            "Retries by reason",
            {"{{reason}}": rate("job_retries_total", by="reason")},
            "Infrastructure faults; never the job's own.",
            unit=Unit.PER_SECOND,
        ),
        time(
            "Engine restarts and hangs",
            {
                "restarts {{instance}}": rate("engine_restarts_total", by="instance"),
                "hangs {{instance}}": rate("engine_hangs_total", by="instance"),
            },
            "Each one costs the running jobs an attempt.",
            unit=Unit.PER_SECOND,
        ),
    ),
)
