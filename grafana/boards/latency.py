"""What does a caller wait for?"""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Kind, Panel, Query, Unit
from grafana.promql import buckets
from grafana.shapes import quantiles

BOARD: Final = Board(
    "edgellm-latency",
    "edgellm / Latency",
    "What does a caller wait for?",
    (
        quantiles("Submit to answer", "e2e_request_latency_seconds", "Whole life of a job."),
        quantiles("Time to first token", "time_to_first_token_seconds", "From submit to the first token."),
        quantiles("Time per output token", "request_time_per_output_token_seconds", "After the first token, per job."),
        quantiles("In the queue", "request_queue_time_seconds", "From submit until a worker read it."),
        Panel(
            "Submit to answer, distribution",
            Kind.HEATMAP,
            (Query(buckets("e2e_request_latency_seconds"), "{{le}}"),),
            "Jobs per latency band.",
        ),
        quantiles("Submit to batch closed", "batch_wait_seconds", "Of the oldest job of each group."),
        quantiles("Prompt tokens", "request_prompt_tokens", "Per job.", Unit.NONE),
        quantiles("Generated tokens", "request_generation_tokens", "Per job.", Unit.NONE),
    ),
)
