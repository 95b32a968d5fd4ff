"""Is it working?"""

from __future__ import annotations

from typing import Final

from grafana.panel import AMBER, GREEN, RED, Board, Kind, Panel, Query, Unit
from grafana.promql import gauge, rate, ratio, shared
from grafana.shapes import ACCEPTED, DRAFTED, FAILED, FINISHED, HEALTHY_RATIO, IDLE, NO_DRAFTS, TOKENS, stat, time

BOARD: Final = Board(
    "edgellm-overview",
    "edgellm / Overview",
    "Is it working?",
    (
        stat("Jobs/s", FINISHED, "Jobs answered with text, per second.", unit=Unit.PER_SECOND),
        stat("Tokens/s", TOKENS, "Generated tokens per second, all workers chosen above.", unit=Unit.PER_SECOND),
        stat(
            "Answered with text",
            ratio(FINISHED, f"({FINISHED} + {FAILED})"),
            "Share of answers that are text. The rest are refusals and failures: see Errors.",
            unit=Unit.RATIO,
            steps=HEALTHY_RATIO,
            when_empty=IDLE,
        ),
        stat(
            "Oldest job",
            f"max ({shared('queue_oldest_seconds')})",
            "Age of the oldest unanswered job in any lane.",
            unit=Unit.SECONDS,
            steps=((None, GREEN), (30.0, AMBER), (60.0, RED)),
        ),
        stat(
            "Draft acceptance",
            ratio(ACCEPTED, DRAFTED),
            "Accepted drafts over drafted tokens.",
            unit=Unit.RATIO,
            steps=((None, RED), (0.2, AMBER), (0.4, GREEN)),
            when_empty=NO_DRAFTS,
        ),
        stat(
            "Workers reaching Redis",
            gauge("redis_up"),
            "How many of the chosen workers had an answer from Redis lately.",
            steps=((None, RED), (1.0, GREEN)),
        ),
        time(
            "Jobs answered",
            {"{{finished_reason}}": rate("request_success_total", by="finished_reason"), "not text": FAILED},
            "By how the text ended; refused and failed jobs as one line.",
            unit=Unit.PER_SECOND,
        ),
        time(
            "Tokens",
            {"generated": TOKENS, "prompt": rate("prompt_tokens_total")},
            "Tokens per second in and out.",
            unit=Unit.PER_SECOND,
        ),
        time(
            "Jobs in this fleet",
            {
                "running": gauge("num_requests_running"),
                "waiting for a slot": gauge("num_requests_waiting"),
                "in the queue": f"sum ({shared('queue_length', by='priority')})",
            },
            "In the queue includes what workers hold.",
        ),
        Panel(
            "Worker state",
            Kind.STATES,
            (Query(gauge("worker_state", by="instance, state", agg="max") + " > 0", "{{instance}} {{state}}"),),
            "One band per worker and state.",
        ),
    ),
)
