"""The HTTP application: OpenAI's routes over one `Producer`.

    POST /v1/chat/completions, /v1/completions    whole or streamed (server-sent events)
    GET  /v1/models                               the names given at start
    GET  /health                                  200 while the queue answers

A client that hangs up cancels its job, streamed or not; nothing else here does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from edgellm_producer.client import Producer
from edgellm_producer.errors import EdgellmError, JobError, JobRejected, QueueFull, QueueUnreachable, UnknownJob
from edgellm_producer.gateway.access import ApiKeys, Throughput
from edgellm_producer.job import SubmittedJob
from edgellm_producer.openai.requests import Endpoint, OpenAiRequest, request_from_body
from edgellm_producer.openai.responses import (
    ErrorBody,
    ResponseShape,
    body_from_reply,
    chunk_from_delta,
    error_from_code,
    error_from_full_queue,
    first_chunk,
    last_chunk,
    usage_chunk,
)
from edgellm_producer.streaming import Restarted
from edgellm_producer.wire import MAX_JOB_BYTES, ErrorCode, Reply

_DISCONNECT_POLL_S: Final = 0.1
_DONE: Final = b"data: [DONE]\n\n"
_UNAUTHORIZED: Final = ErrorBody(
    401, {"message": "unknown API key", "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """`timeout_s` bounds every request, as the job's own `timeout_s`."""

    models: tuple[str, ...]
    keys: ApiKeys
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Gateway:
    producer: Producer
    options: GatewayOptions
    throughput: Throughput = field(default_factory=Throughput)

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route(Endpoint.CHAT, self.chat, methods=["POST"]),
                Route(Endpoint.COMPLETIONS, self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ],
            exception_handlers={HTTPException: _no_such_route},
        )

    async def chat(self, request: Request) -> Response:
        return await self._generate(Endpoint.CHAT, request)

    async def completions(self, request: Request) -> Response:
        return await self._generate(Endpoint.COMPLETIONS, request)

    async def models(self, request: Request) -> Response:
        if not self.options.keys.is_allowed(request.headers.get("authorization")):
            return _error_response(_UNAUTHORIZED)
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "edgellm"} for name in self.options.models]
        return JSONResponse({"object": "list", "data": rows})

    async def health(self, _: Request) -> Response:
        try:
            await self.producer.status("health-probe")
        except QueueUnreachable as error:
            return JSONResponse({"status": "queue unreachable", "reason": str(error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _generate(self, endpoint: Endpoint, request: Request) -> Response:
        authorization = request.headers.get("authorization")
        if not self.options.keys.is_allowed(authorization):
            return _error_response(_UNAUTHORIZED)
        try:
            wanted = request_from_body(endpoint, await _json_body(request))
            job = await self.producer.submit(**self._fields(wanted, request))
        except QueueFull as error:
            retry_after_s = self.throughput.retry_after_s(error, time.monotonic())
            return _error_response(error_from_full_queue(error), {"Retry-After": str(retry_after_s)})
        except EdgellmError as error:
            return _error_response(_error_body(error))
        model = str(wanted.fields.get("model") or next(iter(self.options.models), ""))
        shape = ResponseShape(endpoint, job.id, model, int(time.time()))
        if wanted.fields.get("stream"):
            return StreamingResponse(self._events(job, shape, wanted), media_type="text/event-stream")
        return await self._whole(request, job, shape)

    def _fields(self, wanted: OpenAiRequest, request: Request) -> dict[str, Any]:
        tenant = self.options.keys.tenant(request.headers.get("authorization"))
        key = request.headers.get("idempotency-key")
        given = {
            "timeout_s": self.options.timeout_s,
            "tenant": tenant,
            # The queue's keys are one for all; no tenant finds, or cancels, another's job by guessing its key.
            "idempotency_key": key if key is None or tenant is None else f"{tenant}:{key}",
            "traceparent": request.headers.get("traceparent"),
        }
        return {**{name: value for name, value in given.items() if value is not None}, **wanted.fields}

    async def _whole(self, request: Request, job: SubmittedJob, shape: ResponseShape) -> Response:
        waiting = asyncio.ensure_future(job.result())
        async with _cancelling(job):
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_DISCONNECT_POLL_S)
                if not waiting.done() and await request.is_disconnected():
                    waiting.cancel()
                    raise ClientDisconnect
        try:
            reply = waiting.result()
        except EdgellmError as error:
            return _error_response(_error_body(error))
        self.throughput.answered(time.monotonic())
        return JSONResponse(body_from_reply(shape, reply))

    async def _events(self, job: SubmittedJob, shape: ResponseShape, wanted: OpenAiRequest) -> AsyncIterator[bytes]:
        """Leaving this generator before its end is the client's hanging up."""
        async with _cancelling(job):
            if shape.endpoint is Endpoint.CHAT:
                yield _event(first_chunk(shape))
            try:
                async for delta in job.stream():
                    if isinstance(delta, Restarted):  # what was sent cannot be taken back
                        await job.cancel()
                        raise JobRejected(ErrorCode.ENGINE_ERROR, "the text had to be started anew; ask again")
                    if delta.text or delta.logprobs:
                        yield _event(chunk_from_delta(shape, delta))
                reply = await job.result()
            except EdgellmError as error:
                yield _event(_error_body(error).body)
            else:
                self.throughput.answered(time.monotonic())
                for chunk in _closing(shape, reply, wanted):
                    yield _event(chunk)
            yield _DONE


def _closing(shape: ResponseShape, reply: Reply, wanted: OpenAiRequest) -> list[dict[str, Any]]:
    chunks = [last_chunk(shape, reply)]
    return [*chunks, usage_chunk(shape, reply)] if wanted.include_usage else chunks


@contextlib.asynccontextmanager
async def _cancelling(job: SubmittedJob) -> AsyncIterator[None]:
    """Cancel the job when the block is left by an exception: the client is gone, or the gateway stops. One that was
    there before (the same idempotency key) has another client, who may still wait.
    """
    try:
        yield
    except BaseException:
        if job.is_duplicate:
            raise
        with contextlib.suppress(QueueUnreachable, UnknownJob):
            await asyncio.shield(job.cancel())
        raise


async def _json_body(request: Request) -> Any:
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_JOB_BYTES:
            raise JobRejected(ErrorCode.TOO_LARGE, f"body over {MAX_JOB_BYTES} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise JobRejected(ErrorCode.MALFORMED, "body is not JSON") from error


def _no_such_route(request: Request, error: Exception) -> Response:
    """As OpenAI's clients read errors, instead of a line of text."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path} is not served here"
    return _error_response(
        ErrorBody(status, {"message": message, "type": "invalid_request_error", "param": None, "code": None})
    )


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _error_body(error: EdgellmError) -> ErrorBody:
    if isinstance(error, JobError):
        return error_from_code(error.code, error.message, error.field)
    if isinstance(error, QueueUnreachable):
        return ErrorBody(503, {"message": str(error), "type": "server_error", "param": None, "code": "unavailable"})
    return error_from_code(ErrorCode.ENGINE_ERROR, str(error))


def _error_response(error: ErrorBody, headers: dict[str, str] | None = None) -> Response:
    """In ASCII: it may repeat half a character from the request."""
    body = json.dumps(error.body)
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")
