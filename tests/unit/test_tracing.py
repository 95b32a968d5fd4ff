"""Spans of a job, from its answer, through OpenTelemetry's own SDK."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from edgellm_producer.keys import Priority
from edgellm_producer.wire import (
    BatchInfo,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Job,
    Reply,
    Speculative,
    Status,
    Timings,
    Usage,
)
from edgellm_worker.queue.api import Delivery
from edgellm_worker.tracing import NoTracer, OpenTelemetryTracer, tracer_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SUBMITTED_MS = 1_700_000_000_000


def delivery(**fields: object) -> Delivery:
    job = Job.model_validate({"id": "j1", "prompt": "secret words", "model": "tiny", "traceparent": PARENT} | fields)
    return Delivery(
        job=job,
        priority=Priority.HIGH,
        entry_id="1-0",
        attempt=0,
        enqueued_at_ms=SUBMITTED_MS,
        deadline_ms=None,
        taken_at=1.0,
        taken_at_ms=SUBMITTED_MS + 100,
    )


REPLY = Reply(
    id="j1",
    status=Status.OK,
    text="secret answer",
    finish_reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=7, completion_tokens=9, total_tokens=16),
    timings=Timings(queue_ms=100, batch_wait_ms=5, prefill_ms=20, generation_ms=300, total_ms=425),
    speculative=Speculative(method="mtp", draft_acceptance_rate=0.5, num_spec_steps=4),
    batch=BatchInfo(id="b1", size=3, engine="reference"),
    attempt=1,
    worker="w",
)


@pytest.fixture
def spans():
    """Feed it an answer, get the exported spans by name."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = OpenTelemetryTracer(provider, queue="default")

    def answered(given: Delivery, reply: Reply) -> dict[str, ReadableSpan]:
        tracer.answered(given, reply)
        return {span.name: span for span in exporter.get_finished_spans()}

    yield answered
    tracer.close()


def milliseconds(span: ReadableSpan) -> tuple[float, float]:
    return (span.start_time / 1e6 - SUBMITTED_MS, span.end_time / 1e6 - SUBMITTED_MS)


def test_stages_follow_each_other_inside_the_outer_span(spans):
    found = spans(delivery(), REPLY)
    assert {name: milliseconds(span) for name, span in found.items()} == {
        "text_completion tiny": (0, 425),
        "queue": (0, 100),
        "batch": (100, 105),
        "prefill": (105, 125),
        "generate": (125, 425),
    }
    outer = found["text_completion tiny"]
    assert all(s.parent.span_id == outer.context.span_id for s in found.values() if s is not outer)


def test_the_jobs_traceparent_is_the_parent(spans):
    outer = spans(delivery(), REPLY)["text_completion tiny"]
    assert f"{outer.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{outer.parent.span_id:016x}" == PARENT.split("-")[2]


def test_without_traceparent_a_trace_begins(spans):
    assert spans(delivery(traceparent=None), REPLY)["text_completion tiny"].parent is None


def test_attributes_are_the_conventions_and_hold_no_text(spans):
    found = spans(delivery(max_tokens=64, temperature=0.5), REPLY)
    attributes = found["text_completion tiny"].attributes
    assert attributes["gen_ai.request.max_tokens"] == 64
    assert attributes["gen_ai.usage.output_tokens"] == 9
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["messaging.destination.name"] == "default"
    assert found["batch"].attributes["edgellm.batch.size"] == 3
    assert "secret" not in repr([dict(span.attributes) for span in found.values()])


def test_a_refused_job_has_its_queue_span_and_its_code(spans):
    reply = Reply(
        id="j1",
        status=Status.REJECTED,
        error=ErrorInfo(code=ErrorCode.INVALID_FIELD, message="no", field="top_p"),
        timings=Timings(queue_ms=100, total_ms=101),
    )
    found = spans(delivery(messages=[{"role": "user", "content": "secret"}], prompt=None), reply)
    assert set(found) == {"chat tiny", "queue"}
    assert found["chat tiny"].status.status_code is StatusCode.ERROR
    assert found["chat tiny"].attributes["error.type"] == "invalid_field"


def test_tracing_is_off_without_an_endpoint():
    assert isinstance(tracer_of({}, queue="default", worker="w"), NoTracer)
