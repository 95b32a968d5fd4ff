"""The series: all there from the start, bounded, right after each event; the reference page current."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edgellm_producer.keys import Priority
from edgellm_producer.wire import ErrorCode, ErrorInfo, FinishReason, Reply, Status, Timings, Usage
from edgellm_worker.batching import Batch, Candidate, CloseReason
from edgellm_worker.engine.api import Phase, RowUpdate, StepReport
from edgellm_worker.health import HealthSnapshot, WorkerState
from edgellm_worker.metrics import Metrics, MetricsShape
from edgellm_worker.metrics.definitions import DEFINITIONS, PREFIX, Kind
from edgellm_worker.metrics.reference import reference
from edgellm_worker.metrics.series import SeriesTable
from edgellm_worker.queue.api import QueueCounters, QueueStats
from edgellm_worker.telemetry import Quantity, Source, TelemetryReading
from edgellm_worker.telemetry.reading import Sample

ROOT = Path(__file__).parents[2]


@pytest.fixture
def metrics():
    return Metrics(MetricsShape(4, 3, 1000, ("0.1", "3.11", "fake", "tiny", "mtp"), ("4", "64", "128", "3", "static")))


def families(metrics: Metrics) -> dict[str, list]:
    return {f.name: f.samples for f in text_string_to_metric_families(metrics.render().decode())}


def ok_reply(**fields) -> Reply:
    timings = Timings(queue_ms=100, time_to_first_token_ms=200, generation_ms=900, total_ms=1100)
    usage = Usage(prompt_tokens=7, completion_tokens=10, total_tokens=17)
    return Reply(id="a", status=Status.OK, finish_reason=FinishReason.STOP, timings=timings, usage=usage, **fields)


def test_every_series_with_known_labels_exists_from_the_start(metrics):
    found = families(metrics)
    for definition in DEFINITIONS:
        name = definition.full_name.removesuffix("_total") if definition.kind is Kind.COUNTER else definition.full_name
        assert name in found, definition.name
    labelled = {(s.name, tuple(s.labels.items())) for samples in found.values() for s in samples}
    assert (f"{PREFIX}request_failure_total", (("code", "poison"),)) in labelled
    assert (f"{PREFIX}queue_oldest_seconds", (("priority", "low"),)) in labelled
    assert (f"{PREFIX}spec_decode_num_accepted_tokens_per_pos_total", (("position", "2"),)) in labelled
    for reason in CloseReason:
        assert (f"{PREFIX}batch_close_total", (("reason", str(reason)),)) in labelled


def test_there_are_no_created_series(metrics):
    assert "_created" not in metrics.render().decode()


@pytest.mark.parametrize("definition", [d for d in DEFINITIONS if d.kind is Kind.HISTOGRAM], ids=lambda d: d.name)
def test_a_histogram_reads_as_the_librarys_own(definition):
    """Bounds themselves, values around them, and beyond the last."""
    names = definition.label.names if definition.label else ()
    labels = ("x",) * len(names)
    registries = CollectorRegistry(), CollectorRegistry()
    ours = SeriesTable([definition])
    registries[0].register(ours)
    theirs = Histogram(definition.full_name, definition.help, names, registry=registries[1], buckets=definition.buckets)
    if labels:
        ours.create(definition.name, *labels)
    for bound in definition.buckets:
        for value in (bound, bound * 0.999, bound * 1.001):
            ours.observe(definition.name, value, *labels)
            (theirs.labels(*labels) if labels else theirs).observe(value)
    read, wanted = ([x for x in generate_latest(r).decode().splitlines() if "_created" not in x] for r in registries)
    assert read == wanted


def test_hostile_names_make_no_new_series(metrics):
    before = metrics.render().decode().count("\n")
    for n in range(1000):
        error = ErrorInfo(code=f"made-up-{n}", message="x")
        metrics.answered(Reply(id="a", status=Status.FAILED, error=error))
        metrics.counters(QueueCounters(answered={f"made-up-{n}": 1}))
        metrics.memory({f"kind-{n}": 1})
    assert metrics.render().decode().count("\n") <= before + 32, "memory kinds are bounded, codes are an enum"


def test_an_ok_answer_counts_once_in_each_histogram(metrics):
    metrics.answered(ok_reply())
    assert metrics.value("request_success_total", finished_reason="stop") == 1
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "time_to_first_token_seconds"):
        assert metrics.value(f"{name}_count") == 1
    assert metrics.value("e2e_request_latency_seconds_sum") == pytest.approx(1.1)
    assert metrics.value("request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert metrics.value("request_prompt_tokens_sum") == 7
    assert metrics.value("request_generation_tokens_sum") == 10


def test_every_other_answer_counts_by_its_code(metrics):
    error = ErrorInfo(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message="x", field="prompt")
    metrics.answered(Reply(id="a", status=Status.REJECTED, error=error))
    assert metrics.value("request_failure_total", code="context_length_exceeded") == 1
    assert metrics.value("e2e_request_latency_seconds_count") == 0


def test_a_step_counts_drafts_by_position(metrics):
    updates = (
        RowUpdate(1, (5, 6, 7), num_drafted=3, num_accepted=2),
        RowUpdate(2, (5,), num_drafted=3, num_accepted=0),
        RowUpdate(3, (9,), is_verify=False),
    )
    metrics.stepped(StepReport(updates, 3, {Phase.VERIFY: 0.02, Phase.DRAFT: 0.01}, 3, 11, 250, {"weights": 5}))
    assert metrics.value("spec_decode_num_drafts_total") == 2
    assert metrics.value("spec_decode_num_draft_tokens_total") == 6
    assert metrics.value("spec_decode_num_accepted_tokens_total") == 2
    assert metrics.per_position("spec_decode_num_accepted_tokens_per_pos_total") == [1, 1, 0]
    assert metrics.value("generation_tokens_total") == 5
    assert metrics.value("prompt_tokens_total") == 11
    assert metrics.value("step_duration_seconds_count", phase="verify") == 1
    assert metrics.value("step_rows_sum") == 3
    assert metrics.value("kv_cache_usage_perc") == metrics.value("kv_cache_usage_ratio") == 0.25
    assert metrics.value("memory_bytes", kind="weights") == 5


def test_batches_that_were_handed_back_are_no_batch_sizes(metrics):
    members = (Candidate("a", 1, Priority.NORMAL, 0.0),)
    metrics.batch_closed(Batch("b-1", members, CloseReason.LINGER, 0.004))
    metrics.batch_closed(Batch("b-2", members, CloseReason.DRAIN, 0.004))
    assert metrics.value("batch_close_total", reason="drain") == 1
    assert metrics.value("batch_size_count") == 1
    assert metrics.value("batch_wait_seconds_sum") == 0.004


def test_queue_numbers_are_copied_and_totals_only_rise(metrics):
    stats = QueueStats({Priority.HIGH: 2, Priority.LOW: 5}, {Priority.LOW: 9.5}, 3, 1, 4, 6)
    metrics.queue(stats)
    assert metrics.value("queue_length", priority="low") == 5
    assert metrics.value("queue_oldest_seconds", priority="low") == 9.5
    assert [metrics.value(f"queue_{name}") for name in ("lag", "pending", "held", "delayed", "dead")] == [4, 3, 1, 4, 6]
    for num_reclaimed in (2, 2, 5):
        metrics.counters(QueueCounters(num_reclaimed, 1, 0.5, {"malformed": num_reclaimed}))
    assert metrics.value("jobs_reclaimed_total") == 5
    assert metrics.value("redis_reconnects_total") == 1
    assert metrics.value("request_failure_total", code="malformed") == 5
    assert metrics.value("lease_renewal_age_seconds") == 0.5


def test_exactly_one_worker_state_holds(metrics):
    metrics.health(HealthSnapshot(WorkerState.READY, engine_ready=False), redis_up=True)
    states = {str(state): metrics.value("worker_state", state=state) for state in WorkerState}
    assert states == {str(state): float(state is WorkerState.RESTARTING) for state in WorkerState}
    assert metrics.value("redis_up") == 1


def test_a_sensor_that_stops_answering_leaves_no_number_behind(metrics):
    available = dict.fromkeys(Source, False)
    warm = (Sample(Quantity.TEMPERATURE_CELSIUS, "gpu", 50.0), Sample(Quantity.MEMORY_BYTES, "host_total", 9.0))
    metrics.device(TelemetryReading(warm, {**available, Source.THERMAL: True}, 12.0))
    assert metrics.value("device_temperature_celsius", sensor="gpu") == 50.0
    assert metrics.value("telemetry_available", source="thermal") == 1
    assert metrics.value("device_energy_joules_total", rail="total") == 12.0
    metrics.device(TelemetryReading((), available, 12.0))
    assert "device_temperature_celsius{" not in metrics.render().decode()
    assert metrics.value("telemetry_available", source="thermal") == 0


def test_the_reference_page_is_current():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m edgellm_worker.metrics.reference > docs/metrics.md"
