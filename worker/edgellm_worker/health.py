"""Whether the worker is alive and ready, as pure functions over one snapshot.

Health is "something happened lately", never "the process exists": any Redis reply within 10 s (lease renewals count,
because a full worker does not read), and, while rows run, an engine step within its allowance. The body of
/health/ready lists every reason against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

REDIS_SILENT_AFTER_S: Final = 10.0
ENGINE_SILENT_AFTER_S: Final = 60.0
LOOP_STUCK_AFTER_S: Final = 60.0


class WorkerState(StrEnum):
    """The label of `worker_state`; exactly one holds."""

    LOADING = "loading"
    READY = "ready"
    NO_REDIS = "no_redis"
    HUNG = "hung"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """`phase` is what the daemon is doing (LOADING, READY, DRAINING or STOPPED); ages in seconds.

    engine_age_s  since the engine last reported, or since the first of the running rows was added if that is later;
                  0 when no row runs
    loop_age_s    since the event loop last turned
    """

    phase: WorkerState
    redis_age_s: float = 0.0
    engine_ready: bool = True
    engine_age_s: float = 0.0
    loop_age_s: float = 0.0


def state_of(snapshot: HealthSnapshot) -> WorkerState:
    """The worst thing that is true."""
    if snapshot.phase is not WorkerState.READY:
        return snapshot.phase
    if snapshot.engine_age_s > ENGINE_SILENT_AFTER_S:
        return WorkerState.HUNG
    if not snapshot.engine_ready:
        return WorkerState.RESTARTING
    if snapshot.redis_age_s > REDIS_SILENT_AFTER_S:
        return WorkerState.NO_REDIS
    return WorkerState.READY


def not_ready(snapshot: HealthSnapshot) -> list[str]:
    """Every reason against sending this worker jobs; empty when it is ready."""
    reasons = []
    if snapshot.phase is not WorkerState.READY:
        reasons.append(str(snapshot.phase))
    if snapshot.redis_age_s > REDIS_SILENT_AFTER_S:
        reasons.append(f"no reply from Redis for {snapshot.redis_age_s:.0f} s")
    if not snapshot.engine_ready:
        reasons.append("engine is not running")
    if snapshot.engine_age_s > ENGINE_SILENT_AFTER_S:
        reasons.append(f"engine made no step for {snapshot.engine_age_s:.0f} s")
    return reasons + not_live(snapshot)


def not_live(snapshot: HealthSnapshot) -> list[str]:
    """Why the process should be restarted; empty when it should not."""
    if snapshot.loop_age_s > LOOP_STUCK_AFTER_S:
        return [f"event loop stuck for {snapshot.loop_age_s:.0f} s"]
    return []
