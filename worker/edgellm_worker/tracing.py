"""OpenTelemetry spans of a job, made from its answer.

    <operation> <model>   from submit to the answer; child of the job's `traceparent`, else a new trace
    ├── queue             submit until a worker read it
    ├── batch             until its rows joined the engine
    ├── prefill           until the first token
    └── generate          until the last token

Every instant is known from the reply's timings, so nothing is measured twice and a job costs nothing until it ends. A
job that never started has the outer span and `queue` only. Attribute names are OpenTelemetry's GenAI and messaging
conventions; prompts and texts are never among them.

The package is optional (extra `tracing`) and is configured as everywhere, by the OTEL_* variables.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

from edgellm_producer.wire import BatchInfo, Job, Reply, Status
from edgellm_worker.outcome import Outcome
from edgellm_worker.queue.api import Delivery

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
Attributes = Mapping[str, str | int | float | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SpanTimes:
    """`start_ns` and `end_ns` are nanoseconds since the epoch, by the Redis server's clock."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobTrace:
    """`parent` is a W3C traceparent or None; `error` says why the job has no text."""

    outer: SpanTimes
    children: tuple[SpanTimes, ...]
    parent: str | None
    error: str | None


class Tracer(Protocol):
    def answered(self, delivery: Delivery, reply: Reply | Outcome) -> None:
        """A reply became the visible one."""

    def close(self) -> None:
        """Send what is not sent yet."""


def trace_of(delivery: Delivery, reply: Reply | Outcome, *, queue: str) -> JobTrace:
    job, timings = delivery.job, reply.timings
    operation = "chat" if job.messages is not None else "text_completion"
    stages: list[tuple[str, float, Attributes]] = [("queue", timings.queue_ms, {})]
    if reply.batch is not None:
        stages += _engine_stages(reply, reply.batch)
    start_ns = at_ns = delivery.enqueued_at_ms * 1_000_000
    children = []
    for name, duration_ms, attributes in stages:
        end_ns = at_ns + round(duration_ms * 1e6)
        children.append(SpanTimes(name, at_ns, end_ns, attributes))
        at_ns = end_ns
    end_ns = max(at_ns, start_ns + round(timings.total_ms * 1e6))
    outer = SpanTimes(
        f"{operation} {job.model or 'default'}",
        start_ns,
        end_ns,
        {**_request_attributes(job, operation), **_reply_attributes(reply), **_queue_attributes(delivery, queue)},
    )
    error = None if reply.status is Status.OK else (reply.error.code if reply.error else str(reply.status))
    return JobTrace(outer, tuple(children), job.traceparent, error)


def _engine_stages(reply: Reply | Outcome, batch: BatchInfo) -> list[tuple[str, float, Attributes]]:
    timings, drafts = reply.timings, reply.speculative
    return [
        ("batch", timings.batch_wait_ms, {"edgellm.batch.id": batch.id, "edgellm.batch.size": batch.size}),
        ("prefill", timings.prefill_ms, {"gen_ai.usage.input_tokens": reply.usage.prompt_tokens}),
        (
            "generate",
            timings.generation_ms,
            {
                "gen_ai.usage.output_tokens": reply.usage.completion_tokens,
                "edgellm.speculative.method": drafts.method,
                "edgellm.speculative.acceptance_rate": drafts.draft_acceptance_rate,
                "edgellm.speculative.steps": drafts.num_spec_steps,
            },
        ),
    ]


def _request_attributes(job: Job, operation: str) -> Attributes:
    asked = {
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": job.max_tokens,
        "gen_ai.request.temperature": job.temperature,
        "gen_ai.request.top_p": job.top_p,
        "gen_ai.request.top_k": job.top_k,
        "gen_ai.request.seed": job.seed,
    }
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "edgellm",
        **{name: value for name, value in asked.items() if value is not None},
    }


def _reply_attributes(reply: Reply | Outcome) -> Attributes:
    attributes: dict[str, str | int | float | tuple[str, ...]] = {
        "gen_ai.response.id": reply.id,
        "gen_ai.usage.input_tokens": reply.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": reply.usage.completion_tokens,
        "edgellm.status": str(reply.status),
        "edgellm.attempt": reply.attempt,
    }
    if reply.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (str(reply.finish_reason),)
    return attributes


def _queue_attributes(delivery: Delivery, queue: str) -> Attributes:
    return {
        "messaging.system": "redis",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue,
        "messaging.message.id": delivery.id,
        "edgellm.priority": str(delivery.priority),
    }


class NoTracer:
    """Tracing is off."""

    def answered(self, delivery: Delivery, reply: Reply | Outcome) -> None:
        pass

    def close(self) -> None:
        pass


class OpenTelemetryTracer:
    """`provider` is an SDK TracerProvider; it belongs to this object and is shut down by `close`."""

    def __init__(self, provider: Any, *, queue: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("edgellm_worker")
        self._api = importlib.import_module("opentelemetry.trace")
        propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._queue = queue

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, queue: str, worker: str) -> Self | None:
        """None when no endpoint is configured. Raises ImportError when one is and the extra is not installed."""
        if not any(environment.get(name) for name in ENDPOINT_VARIABLES):
            return None
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resource = resources.Resource.create({"service.name": "edgellm-worker", "service.instance.id": worker})
        provider = sdk.TracerProvider(resource=resource)
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        return cls(provider, queue=queue)

    def answered(self, delivery: Delivery, reply: Reply | Outcome) -> None:
        self._emit(trace_of(delivery, reply, queue=self._queue))

    def close(self) -> None:
        self._provider.shutdown()

    def _emit(self, trace: JobTrace) -> None:
        parent = self._propagator.extract({"traceparent": trace.parent}) if trace.parent else None
        outer = self._start(trace.outer, parent, self._api.SpanKind.CONSUMER)
        inside = self._api.set_span_in_context(outer)
        for child in trace.children:
            self._start(child, inside, self._api.SpanKind.INTERNAL).end(child.end_ns)
        if trace.error is not None:
            outer.set_attribute("error.type", trace.error)
            outer.set_status(self._api.StatusCode.ERROR)
        outer.end(trace.outer.end_ns)

    def _start(self, span: SpanTimes, context: Any, kind: Any) -> Any:
        return self._tracer.start_span(
            span.name, context=context, kind=kind, attributes=dict(span.attributes), start_time=span.start_ns
        )


def tracer_of(environment: Mapping[str, str], *, queue: str, worker: str) -> Tracer:
    """The tracer that the OTEL_* variables ask for."""
    return OpenTelemetryTracer.from_environment(environment, queue=queue, worker=worker) or NoTracer()
