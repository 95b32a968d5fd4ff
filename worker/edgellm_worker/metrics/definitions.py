"""Every metric of the worker, as one table. Names and buckets are vLLM's where it has the same quantity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIX: Final = "edgellm_"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Label(StrEnum):
    PRIORITY = "priority"
    FINISHED_REASON = "finished_reason"
    CODE = "code"
    POSITION = "position"
    RETRY_REASON = "reason"
    CLOSE_REASON = "close reason"
    PHASE = "phase"
    MEMORY_KIND = "kind"
    STATE = "state"
    SOURCE = "source"
    RAIL = "rail"
    SENSOR = "sensor"
    UNIT = "unit"
    DOMAIN = "domain"
    CAUSE = "cause"
    MODE = "mode"
    BUILD = "build"
    CACHE_CONFIG = "cache config"

    @property
    def names(self) -> tuple[str, ...]:
        """The label names in the exposition: one, but for the two `_info` metrics."""
        return _LABEL_NAMES.get(self, (self.value,))


_LABEL_NAMES: Final[dict[Label, tuple[str, ...]]] = {
    Label.CLOSE_REASON: ("reason",),
    Label.BUILD: ("version", "python", "engine", "model", "speculative"),
    Label.CACHE_CONFIG: (
        "max_batch_size",
        "max_input_len",
        "max_kv_cache_capacity",
        "num_speculative_tokens",
        "scheduling",
    ),
}


def _one_two_five(limit: int) -> tuple[float, ...]:
    return tuple(m * 10**e for e in range(7) for m in (1, 2, 5) if m * 10**e <= limit)


REQUEST_SECONDS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
PER_TOKEN_SECONDS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
SHORT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
WAIT_SECONDS: Final = (*SHORT_SECONDS, 30.0, 60.0, 120.0, 300.0)
TOKENS: Final = _one_two_five(200_000)
ROWS: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)


@dataclass(frozen=True, slots=True)
class Definition:
    """`name` is without the prefix and, for counters, with `_total`."""

    group: str
    name: str
    kind: Kind
    help: str
    label: Label | None = None
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _counter(group: str, name: str, text: str, label: Label | None = None) -> Definition:
    return Definition(group, name, Kind.COUNTER, text, label)


def _gauge(group: str, name: str, text: str, label: Label | None = None) -> Definition:
    return Definition(group, name, Kind.GAUGE, text, label)


def _histogram(group: str, name: str, text: str, buckets: tuple[float, ...], label: Label | None = None) -> Definition:
    return Definition(group, name, Kind.HISTOGRAM, text, label, buckets)


_REQUESTS: Final = "Requests"
_DRAFTING: Final = "Drafting"
_QUEUE: Final = "Queue"
_BATCHES: Final = "Batches"
_CAPACITY: Final = "Capacity"
_DEVICE: Final = "Device"

DEFINITIONS: Final = (
    _gauge(_REQUESTS, "num_requests_running", "Jobs that occupy an engine slot."),
    _gauge(
        _REQUESTS, "num_requests_waiting", "Jobs held by this worker that have no slot yet, by lane.", Label.PRIORITY
    ),
    _counter(_REQUESTS, "request_success_total", "Jobs answered `ok`, by how their text ended.", Label.FINISHED_REASON),
    _counter(
        _REQUESTS,
        "request_failure_total",
        "Jobs answered otherwise (rejected, failed, expired, cancelled), by error code.",
        Label.CODE,
    ),
    _histogram(
        _REQUESTS, "e2e_request_latency_seconds", "From submit to the visible answer, `ok` jobs.", REQUEST_SECONDS
    ),
    _histogram(_REQUESTS, "request_queue_time_seconds", "From submit until a worker read the job.", REQUEST_SECONDS),
    _histogram(
        _REQUESTS, "time_to_first_token_seconds", "From submit to the first token of the attempt.", FIRST_TOKEN_SECONDS
    ),
    _histogram(
        _REQUESTS,
        "request_time_per_output_token_seconds",
        "Mean time per token after the first, per `ok` job.",
        PER_TOKEN_SECONDS,
    ),
    _histogram(_REQUESTS, "request_prompt_tokens", "Prompt tokens per `ok` job.", TOKENS),
    _histogram(_REQUESTS, "request_generation_tokens", "Generated tokens per `ok` job.", TOKENS),
    _counter(_REQUESTS, "prompt_tokens_total", "Prompt tokens prefilled."),
    _counter(_REQUESTS, "generation_tokens_total", "Tokens generated, also for jobs that did not end `ok`."),
    _counter(_DRAFTING, "spec_decode_num_drafts_total", "Row-steps that verified at least one draft."),
    _counter(_DRAFTING, "spec_decode_num_draft_tokens_total", "Draft tokens verified."),
    _counter(_DRAFTING, "spec_decode_num_accepted_tokens_total", "Draft tokens that became output."),
    _counter(
        _DRAFTING,
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens that became output, by position in the draft (0 is the first).",
        Label.POSITION,
    ),
    _gauge(_DRAFTING, "spec_decode_num_speculative_tokens", "Draft length of the last step (0: none drafted)."),
    _gauge(
        _QUEUE, "queue_length", "Entries of the lane, those in flight included. Queue-wide: use max().", Label.PRIORITY
    ),
    _gauge(_QUEUE, "queue_lag", "Entries that no worker has read yet. Queue-wide: use max()."),
    _gauge(_QUEUE, "queue_pending", "Entries read and not yet answered. Queue-wide: use max()."),
    _gauge(
        _QUEUE,
        "queue_oldest_seconds",
        "Age of the lane's oldest entry, 0 when empty. Queue-wide: use max().",
        Label.PRIORITY,
    ),
    _gauge(_QUEUE, "queue_held", "Jobs of busy tenants that wait outside the lanes. Queue-wide: use max()."),
    _gauge(_QUEUE, "queue_dead", "Dead-letter entries. Queue-wide: use max()."),
    _gauge(_QUEUE, "queue_delayed", "Jobs that wait for a retry. Queue-wide: use max()."),
    _counter(_QUEUE, "jobs_reclaimed_total", "Jobs taken over from a worker whose lease ran out."),
    _counter(_QUEUE, "job_retries_total", "Jobs put back for another attempt, by reason.", Label.RETRY_REASON),
    _gauge(_QUEUE, "lease_renewal_age_seconds", "Since the leases of held jobs were last renewed; 0 without any."),
    _gauge(_QUEUE, "redis_up", "1 while Redis answered within the last 10 seconds."),
    _counter(_QUEUE, "redis_reconnects_total", "Connections to Redis that had to be made again."),
    _histogram(_BATCHES, "batch_size", "Jobs per batch (in flight: per admission group).", ROWS),
    _histogram(_BATCHES, "batch_wait_seconds", "Age of a batch's oldest job since it was enqueued.", WAIT_SECONDS),
    _counter(_BATCHES, "batch_close_total", "Batches, by why they were closed.", Label.CLOSE_REASON),
    _histogram(_BATCHES, "step_rows", "Rows per engine step: what batching really achieves.", ROWS),
    _gauge(_BATCHES, "slots_busy", "Engine slots in use."),
    _gauge(_BATCHES, "slots_total", "Engine slots (max-batch-size)."),
    _histogram(_BATCHES, "step_duration_seconds", "Time of one engine step, by phase.", SHORT_SECONDS, Label.PHASE),
    _counter(_BATCHES, "engine_idle_seconds_total", "Seconds in which no row was running."),
    _gauge(_CAPACITY, "kv_cache_usage_perc", "Tokens in the KV cache over its capacity (1 is full; vLLM's name)."),
    _gauge(_CAPACITY, "kv_cache_usage_ratio", "The same number under a name that says its unit."),
    _gauge(_CAPACITY, "memory_bytes", "Memory by kind: what the engine reserved, and the host's.", Label.MEMORY_KIND),
    _counter(_CAPACITY, "engine_restarts_total", "Engine starts after the first."),
    _counter(_CAPACITY, "engine_hangs_total", "Engines killed by the watchdog."),
    _gauge(_CAPACITY, "worker_state", "1 for the state that the worker is in, 0 for the others.", Label.STATE),
    _gauge(_CAPACITY, "build_info", "Always 1; what runs here.", Label.BUILD),
    _gauge(_CAPACITY, "cache_config_info", "Always 1; the limits of the engine.", Label.CACHE_CONFIG),
    _gauge(_DEVICE, "telemetry_available", "1 while this source gives readings.", Label.SOURCE),
    _gauge(_DEVICE, "device_power_watts", "Power by rail; `total` contains the others.", Label.RAIL),
    _counter(
        _DEVICE,
        "device_energy_joules_total",
        "Energy since the start (rail `total`); absent where power cannot be read.",
        Label.RAIL,
    ),
    _gauge(_DEVICE, "device_temperature_celsius", "Temperature by sensor.", Label.SENSOR),
    _gauge(_DEVICE, "device_utilization_ratio", "Share of time busy, as the driver reports it.", Label.UNIT),
    _gauge(_DEVICE, "device_clock_hertz", "Clock by domain.", Label.DOMAIN),
    _gauge(_DEVICE, "device_throttled", "1 while the device holds back its clocks for this cause.", Label.CAUSE),
    _gauge(_DEVICE, "device_power_mode", "Always 1; the board's power mode by name.", Label.MODE),
)
