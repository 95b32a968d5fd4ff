"""`Metrics`: owns the registry and every series; the daemon tells it what happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from edgellm_producer.keys import Priority
from edgellm_producer.wire import ErrorCode, Reply, Status
from edgellm_producer.wire import FinishReason as WireFinishReason
from edgellm_worker.batching import Batch, CloseReason
from edgellm_worker.engine.api import Phase, StepReport
from edgellm_worker.health import HealthSnapshot, WorkerState, state_of
from edgellm_worker.metrics.definitions import DEFINITIONS, PREFIX, Definition, Kind, Label
from edgellm_worker.queue.api import QueueCounters, QueueStats
from edgellm_worker.retry import RetryReason
from edgellm_worker.telemetry import Quantity, Source, TelemetryReading
from edgellm_worker.telemetry.hwmon import TOTAL

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_Series = Counter | Gauge | Histogram
_CLASSES: Final[Mapping[Kind, type[Counter | Gauge]]] = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge}
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


def _create(definition: Definition, registry: CollectorRegistry) -> _Series:
    names = definition.label.names if definition.label else ()
    if definition.kind is Kind.HISTOGRAM:
        return Histogram(definition.full_name, definition.help, names, registry=registry, buckets=definition.buckets)
    return _CLASSES[definition.kind](definition.full_name, definition.help, names, registry=registry)


class Metrics:
    """Times are seconds. Safe to render from another thread."""

    def __init__(self, shape: MetricsShape) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._shape = shape
        self._registry = CollectorRegistry()
        self._series = {d.name: _create(d, self._registry) for d in DEFINITIONS}
        self._totals: dict[tuple[str, ...], float] = {}
        self._memory_kinds: set[str] = set()
        for definition in DEFINITIONS:
            for values in _known_values(definition.label, shape) if definition.label else ():
                self._series[definition.name].labels(*values)
        self._gauge("build_info", *shape.build).set(1)
        self._gauge("cache_config_info", *shape.cache_config).set(1)
        self._gauge("slots_total").set(shape.max_batch_size)
        self._gauge("spec_decode_num_speculative_tokens").set(shape.num_speculative_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def value(self, name: str, **labels: str) -> float:
        """One sample's value by its name in the exposition, without the prefix (summaries and tests)."""
        found = self._registry.get_sample_value(PREFIX + name, labels)
        return 0.0 if found is None else found

    def per_position(self, name: str) -> list[float]:
        """A counter by draft position, the first position first."""
        return [self.value(name, position=str(i)) for i in range(self._shape.num_speculative_tokens)]

    def answered(self, reply: Reply) -> None:
        """An answer that became the visible one."""
        if reply.status is not Status.OK:
            self.failed(reply.error.code if reply.error else ErrorCode.ENGINE_ERROR)
            return
        timings, usage = reply.timings, reply.usage
        self._counter("request_success_total", reply.finish_reason or WireFinishReason.STOP).inc()
        self._histogram("e2e_request_latency_seconds").observe(timings.total_ms / 1e3)
        self._histogram("request_queue_time_seconds").observe(timings.queue_ms / 1e3)
        self._histogram("time_to_first_token_seconds").observe(timings.time_to_first_token_ms / 1e3)
        self._histogram("request_prompt_tokens").observe(usage.prompt_tokens)
        self._histogram("request_generation_tokens").observe(usage.completion_tokens)
        if usage.completion_tokens > 1:
            per_token_s = timings.generation_ms / 1e3 / (usage.completion_tokens - 1)
            self._histogram("request_time_per_output_token_seconds").observe(per_token_s)

    def failed(self, code: str, count: int = 1) -> None:
        known = code if code in set(ErrorCode) else ErrorCode.ENGINE_ERROR
        self._counter("request_failure_total", known).inc(count)

    def stepped(self, report: StepReport) -> None:
        self._counter("prompt_tokens_total").inc(report.num_prefill_tokens)
        for update in report.updates:
            self._counter("generation_tokens_total").inc(len(update.token_ids))
            if update.num_drafted:
                self._counter("spec_decode_num_drafts_total").inc()
                self._counter("spec_decode_num_draft_tokens_total").inc(update.num_drafted)
                self._counter("spec_decode_num_accepted_tokens_total").inc(update.num_accepted)
            for position in range(update.num_accepted):
                self._counter("spec_decode_num_accepted_tokens_per_pos_total", str(position)).inc()
        for phase, seconds in report.phase_s.items():
            self._histogram("step_duration_seconds", phase).observe(seconds)
        if report.num_rows:
            self._histogram("step_rows").observe(report.num_rows)
        if any(update.is_verify for update in report.updates):  # a step that only prefills drafts nothing
            self._gauge("spec_decode_num_speculative_tokens").set(report.num_speculative_tokens)
        self._use_of_kv(report.kv_tokens_used)
        self.memory(report.memory_bytes)

    def _use_of_kv(self, num_tokens: int) -> None:
        ratio = num_tokens / max(1, self._shape.kv_cache_tokens)
        self._gauge("kv_cache_usage_perc").set(ratio)
        self._gauge("kv_cache_usage_ratio").set(ratio)

    def memory(self, kinds: Mapping[str, int | float]) -> None:
        for kind, num_bytes in kinds.items():
            if len(self._memory_kinds) < _MAX_MEMORY_KINDS:
                self._memory_kinds.add(kind)
            if kind in self._memory_kinds:
                self._gauge("memory_bytes", kind).set(num_bytes)

    def batch_closed(self, batch: Batch) -> None:
        self._counter("batch_close_total", batch.reason).inc()
        if batch.reason is not CloseReason.DRAIN:
            self._histogram("batch_size").observe(batch.size)
            self._histogram("batch_wait_seconds").observe(batch.wait_s)

    def held(self, num_running: int, waiting: Mapping[Priority, int]) -> None:
        self._gauge("num_requests_running").set(num_running)
        self._gauge("slots_busy").set(num_running)
        for priority in Priority:
            self._gauge("num_requests_waiting", priority).set(waiting.get(priority, 0))

    def idled(self, seconds: float) -> None:
        self._counter("engine_idle_seconds_total").inc(seconds)

    def retried(self, reason: RetryReason) -> None:
        self._counter("job_retries_total", reason).inc()

    def engine_failed(self, *, hung: bool) -> None:
        if hung:
            self._counter("engine_hangs_total").inc()

    def engine_restarted(self) -> None:
        self._counter("engine_restarts_total").inc()

    def queue(self, stats: QueueStats) -> None:
        for priority in Priority:
            self._gauge("queue_length", priority).set(stats.length.get(priority, 0))
            self._gauge("queue_oldest_seconds", priority).set(stats.oldest_s.get(priority, 0.0))
        for name in ("lag", "pending", "held", "delayed", "dead"):
            self._gauge(f"queue_{name}").set(getattr(stats, name))

    def counters(self, counters: QueueCounters) -> None:
        self._total(counters.num_reclaimed, "jobs_reclaimed_total")
        self._total(counters.num_reconnects, "redis_reconnects_total")
        self._gauge("lease_renewal_age_seconds").set(counters.renewal_age_s)
        for code, count in counters.answered.items():
            self._total(count, "request_failure_total", code if code in set(ErrorCode) else ErrorCode.MALFORMED)

    def health(self, snapshot: HealthSnapshot, *, redis_up: bool) -> None:
        self._gauge("redis_up").set(redis_up)
        for state in WorkerState:
            self._gauge("worker_state", state).set(state is state_of(snapshot))

    def device(self, reading: TelemetryReading) -> None:
        for source, available in reading.available.items():
            self._gauge("telemetry_available", source).set(available)
        for quantity, name in _DEVICE_GAUGES.items():
            series = self._series[name]
            if quantity is not Quantity.MEMORY_BYTES:
                series.clear()  # a sensor that stopped answering leaves no stale number behind
            for label, value in reading.of(quantity).items():
                self._gauge(name, label).set(value)
        if reading.energy_j is not None:
            self._total(reading.energy_j, "device_energy_joules_total", TOTAL)

    def _total(self, total: float, name: str, *labels: str) -> None:
        """Bring a counter up to a total that somebody else counts."""
        before = self._totals.get((name, *labels), 0.0)
        if total > before:
            self._totals[name, *labels] = total
            self._counter(name, *labels).inc(total - before)

    def _counter(self, name: str, *labels: str) -> Counter:
        series = self._series[name]
        assert isinstance(series, Counter)  # noqa: S101 - the table says so
        return series.labels(*labels) if labels else series

    def _gauge(self, name: str, *labels: str) -> Gauge:
        series = self._series[name]
        assert isinstance(series, Gauge)  # noqa: S101 - the table says so
        return series.labels(*labels) if labels else series

    def _histogram(self, name: str, *labels: str) -> Histogram:
        series = self._series[name]
        assert isinstance(series, Histogram)  # noqa: S101 - the table says so
        return series.labels(*labels) if labels else series
