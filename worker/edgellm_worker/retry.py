"""When a job gets another attempt: only for faults of the infrastructure, never for the job's own."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0


class RetryReason(StrEnum):
    """Label of `job_retries_total`."""

    ENGINE_FAILURE = "engine_failure"  # the engine died with this job in it
    ENGINE_HANG = "engine_hang"  # the watchdog killed it


def backoff_s(first_s: float = FIRST_DELAY_S, longest_s: float = LONGEST_DELAY_S) -> Iterator[float]:
    """Doubling delays, without end."""
    delay_s = first_s
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, longest_s)


def retry_delay_s(attempt: int) -> float:
    """How long a job waits before its next attempt; `attempt` counts those made."""
    return float(min(FIRST_DELAY_S * 2 ** max(0, attempt - 1), LONGEST_DELAY_S))
