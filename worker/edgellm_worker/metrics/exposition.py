"""`Metrics`: owns the registry and every series; the daemon tells it what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from edgellm_producer.keys import Priority
from edgellm_producer.wire import ErrorCode, Reply, Status
from edgellm_producer.wire import FinishReason as WireFinishReason
from edgellm_worker.batching import Batch, CloseReason
from edgellm_worker.engine.api import Phase, StepReport
from edgellm_worker.health import HealthSnapshot, WorkerState, state_of
from edgellm_worker.metrics.definitions import DEFINITIONS, PREFIX, Label
from edgellm_worker.metrics.series import SeriesTable
from edgellm_worker.outcome import Outcome
from edgellm_worker.queue.api import QueueCounters, QueueStats
from edgellm_worker.retry import RetryReason
from edgellm_worker.telemetry import Quantity, Source, TelemetryReading
from edgellm_worker.telemetry.hwmon import TOTAL

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_MAX_MEMORY_KINDS: Final = 32
_DEVICE_GAUGES: Final = {
    Quantity.POWER_WATTS: "device_power_watts",
    Quantity.TEMPERATURE_CELSIUS: "device_temperature_celsius",
    Quantity.UTILIZATION_RATIO: "device_utilization_ratio",
    Quantity.CLOCK_HERTZ: "device_clock_hertz",
    Quantity.THROTTLED: "device_throttled",
    Quantity.POWER_MODE: "device_power_mode",
    Quantity.MEMORY_BYTES: "memory_bytes",
}


@dataclass(frozen=True, slots=True)
class MetricsShape:
    """What fixes the number of series: `build` and `cache_config` are the values of the two info metrics, in order."""

    max_batch_size: int
    num_speculative_tokens: int
    kv_cache_tokens: int
    build: tuple[str, ...]
    cache_config: tuple[str, ...]


def _known_values(label: Label, shape: MetricsShape) -> tuple[tuple[str, ...], ...]:
    """The label values that exist from the start; none for what only a device can name."""
    single: dict[Label, tuple[str, ...]] = {
        Label.PRIORITY: tuple(Priority),
        Label.FINISHED_REASON: (WireFinishReason.STOP, WireFinishReason.LENGTH),
        Label.CODE: tuple(ErrorCode),
        Label.POSITION: tuple(str(i) for i in range(max(1, shape.num_speculative_tokens))),
        Label.RETRY_REASON: tuple(RetryReason),
        Label.CLOSE_REASON: tuple(CloseReason),
        Label.PHASE: tuple(Phase),
        Label.STATE: tuple(WorkerState),
        Label.SOURCE: tuple(Source),
    }
    rows: dict[Label, tuple[tuple[str, ...], ...]] = {
        Label.BUILD: (shape.build,),
        Label.CACHE_CONFIG: (shape.cache_config,),
    }
    return rows[label] if label in rows else tuple((value,) for value in single.get(label, ()))


class Metrics:
    """Times are seconds. Safe to render from another thread."""

    def __init__(self, shape: MetricsShape) -> None:
        self._shape = shape
        self._registry = CollectorRegistry()
        self._series = SeriesTable(DEFINITIONS)
        self._registry.register(self._series)
        self._totals: dict[tuple[str, ...], float] = {}
        self._memory_kinds: set[str] = set()
        for definition in DEFINITIONS:
            for values in _known_values(definition.label, shape) if definition.label else ():
                self._series.create(definition.name, *values)
        self._latency = self._series.histogram("e2e_request_latency_seconds")
        self._queue_time = self._series.histogram("request_queue_time_seconds")
        self._first_token = self._series.histogram("time_to_first_token_seconds")
        self._prompt_tokens = self._series.histogram("request_prompt_tokens")
        self._generation_tokens = self._series.histogram("request_generation_tokens")
        self._per_token = self._series.histogram("request_time_per_output_token_seconds")
        self._series.set("build_info", 1, *shape.build)
        self._series.set("cache_config_info", 1, *shape.cache_config)
        self._series.set("slots_total", shape.max_batch_size)
        self._series.set("spec_decode_num_speculative_tokens", shape.num_speculative_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float:
        """One sample's value by its name in the exposition, without the prefix (summaries and tests)."""
        found = self._registry.get_sample_value(PREFIX + name, labels)
        return 0.0 if found is None else found

    def per_position(self, name: str) -> list[float]:
        """A counter by draft position, the first position first."""
        return [self.value(name, position=str(i)) for i in range(self._shape.num_speculative_tokens)]

    def answered(self, reply: Reply | Outcome) -> None:
        """An answer that became the visible one."""
        if reply.status is not Status.OK:
            self.failed(reply.error.code if reply.error else ErrorCode.ENGINE_ERROR)
            return
        timings, usage = reply.timings, reply.usage
        self._series.add("request_success_total", 1, reply.finish_reason or WireFinishReason.STOP)
        self._latency.observe(timings.total_ms / 1e3)
        self._queue_time.observe(timings.queue_ms / 1e3)
        self._first_token.observe(timings.time_to_first_token_ms / 1e3)
        self._prompt_tokens.observe(usage.prompt_tokens)
        self._generation_tokens.observe(usage.completion_tokens)
        if usage.completion_tokens > 1:
            self._per_token.observe(timings.generation_ms / 1e3 / (usage.completion_tokens - 1))

    def failed(self, code: str, count: int = 1) -> None:
        known = code if code in set(ErrorCode) else ErrorCode.ENGINE_ERROR
        self._series.add("request_failure_total", count, known)

    def stepped(self, report: StepReport) -> None:
        updates = report.updates
        self._series.add("prompt_tokens_total", report.num_prefill_tokens)
        self._series.add("generation_tokens_total", sum(len(update.token_ids) for update in updates))
        self._series.add("spec_decode_num_drafts_total", sum(update.num_drafted > 0 for update in updates))
        self._series.add("spec_decode_num_draft_tokens_total", sum(update.num_drafted for update in updates))
        accepted = [update.num_accepted for update in updates]
        self._series.add("spec_decode_num_accepted_tokens_total", sum(accepted))
        for position in range(max(accepted, default=0)):
            reached = sum(num_accepted > position for num_accepted in accepted)
            self._series.add("spec_decode_num_accepted_tokens_per_pos_total", reached, str(position))
        for phase, seconds in report.phase_s.items():
            self._series.observe("step_duration_seconds", seconds, phase)
        if report.num_rows:
            self._series.observe("step_rows", report.num_rows)
        if any(update.is_verify for update in updates):  # a step that only prefills drafts nothing
            self._series.set("spec_decode_num_speculative_tokens", report.num_speculative_tokens)
        self._use_of_kv(report.kv_tokens_used)
        self.memory(report.memory_bytes)

    def _use_of_kv(self, num_tokens: int) -> None:
        ratio = num_tokens / max(1, self._shape.kv_cache_tokens)
        self._series.set("kv_cache_usage_perc", ratio)
        self._series.set("kv_cache_usage_ratio", ratio)

    def memory(self, kinds: Mapping[str, int | float]) -> None:
        for kind, num_bytes in kinds.items():
            if len(self._memory_kinds) < _MAX_MEMORY_KINDS:
                self._memory_kinds.add(kind)
            if kind in self._memory_kinds:
                self._series.set("memory_bytes", num_bytes, kind)

    def batch_closed(self, batch: Batch) -> None:
        self._series.add("batch_close_total", 1, batch.reason)
        if batch.reason is not CloseReason.DRAIN:
            self._series.observe("batch_size", batch.size)
            self._series.observe("batch_wait_seconds", batch.wait_s)

    def held(self, num_running: int, waiting: Mapping[Priority, int]) -> None:
        self._series.set("num_requests_running", num_running)
        self._series.set("slots_busy", num_running)
        for priority in Priority:
            self._series.set("num_requests_waiting", waiting.get(priority, 0), priority)

    def idled(self, seconds: float) -> None:
        self._series.add("engine_idle_seconds_total", seconds)

    def retried(self, reason: RetryReason) -> None:
        self._series.add("job_retries_total", 1, reason)

    def engine_failed(self, *, hung: bool) -> None:
        if hung:
            self._series.add("engine_hangs_total", 1)

    def engine_restarted(self) -> None:
        self._series.add("engine_restarts_total", 1)

    def queue(self, stats: QueueStats) -> None:
        for priority in Priority:
            self._series.set("queue_length", stats.length.get(priority, 0), priority)
            self._series.set("queue_oldest_seconds", stats.oldest_s.get(priority, 0.0), priority)
        for name in ("lag", "pending", "held", "delayed", "dead"):
            self._series.set(f"queue_{name}", getattr(stats, name))

    def counters(self, counters: QueueCounters) -> None:
        self._total(counters.num_reclaimed, "jobs_reclaimed_total")
        self._total(counters.num_reconnects, "redis_reconnects_total")
        self._series.set("lease_renewal_age_seconds", counters.renewal_age_s)
        for code, count in counters.answered.items():
            self._total(count, "request_failure_total", code if code in set(ErrorCode) else ErrorCode.MALFORMED)

    def health(self, snapshot: HealthSnapshot, *, redis_up: bool) -> None:
        self._series.set("redis_up", redis_up)
        for state in WorkerState:
            self._series.set("worker_state", state is state_of(snapshot), state)

    def device(self, reading: TelemetryReading) -> None:
        for source, available in reading.available.items():
            self._series.set("telemetry_available", available, source)
        for quantity, name in _DEVICE_GAUGES.items():
            if quantity is not Quantity.MEMORY_BYTES:
                self._series.clear(name)  # a sensor that stopped answering leaves no stale number behind
            for label, value in reading.of(quantity).items():
                self._series.set(name, value, label)
        if reading.energy_j is not None:
            self._total(reading.energy_j, "device_energy_joules_total", TOTAL)

    def _total(self, total: float, name: str, *labels: str) -> None:
        """Bring a counter up to a total that somebody else counts."""
        before = self._totals.get((name, *labels), 0.0)
        if total > before:
            self._totals[name, *labels] = total
            self._series.add(name, total - before, *labels)
