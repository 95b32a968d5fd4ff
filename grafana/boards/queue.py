"""Does work wait, and is any of it stuck?"""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Unit
from grafana.promql import gauge, rate, shared
from grafana.shapes import quantiles, time

BOARD: Final = Board(
    "edgellm-queue",
    "edgellm / Queue",
    "Does work wait, and is any of it stuck?",
    (
        time("Length", {"{{priority}}": shared("queue_length", by="priority")}, "Entries per lane, running included."),
        time(
            "Oldest job",
            {"{{priority}}": shared("queue_oldest_seconds", by="priority")},
            "Age of each lane's oldest entry. Above 30 s a job counts one lane higher.",
            unit=Unit.SECONDS,
        ),
        time(
            "Unread and held",
            {
                "unread (lag)": shared("queue_lag"),
                "read, unanswered (pending)": shared("queue_pending"),
                "held for busy tenants": shared("queue_held"),
                "delayed retries": shared("queue_delayed"),
                "dead letters": shared("queue_dead"),
            },
            "Lag that grows while pending is flat: the workers are full.",
        ),
        quantiles("Time in queue", "request_queue_time_seconds", "From submit until a worker read it."),
        time(
            "Redeliveries",
            {
                "reclaimed": rate("jobs_reclaimed_total"),
                "retry: {{reason}}": rate("job_retries_total", by="reason"),
            },
            "Reclaimed: the lease of a vanished worker was taken over.",
            unit=Unit.PER_SECOND,
        ),
        time(
            "Lease renewal age",
            {"{{instance}}": gauge("lease_renewal_age_seconds", by="instance", agg="max")},
            "Seconds since each worker last renewed its leases; past the lease others take its jobs.",
            unit=Unit.SECONDS,
        ),
        time(
            "Redis reachable",
            {"{{instance}}": gauge("redis_up", by="instance", agg="min")},
            "1 while Redis answers.",
            max_value=1,
        ),
        time(
            "Reconnects",
            {"{{instance}}": rate("redis_reconnects_total", by="instance")},
            "Connections to Redis made again after a fault.",
            unit=Unit.PER_SECOND,
        ),
    ),
)
