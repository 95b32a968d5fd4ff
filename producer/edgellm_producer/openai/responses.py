"""Replies and deltas to OpenAI's response bodies, stream chunks and errors.

`metrics.speculative_decoding` holds what vLLM reports there per request (its names), so that tools which read one read
the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgellm_producer.errors import JobRejected, QueueFull
from edgellm_producer.openai.requests import Endpoint
from edgellm_producer.wire import Delta, ErrorCode, Reply, TokenLogprob

_OBJECT: Final = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}
_CHUNK_OBJECT: Final = {Endpoint.CHAT: "chat.completion.chunk", Endpoint.COMPLETIONS: "text_completion"}
_ID_PREFIX: Final = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETIONS: "cmpl-"}


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What every body of one request repeats. `created` is Unix seconds."""

    endpoint: Endpoint
    job_id: str
    model: str
    created: int

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        names = _CHUNK_OBJECT if chunk else _OBJECT
        return {
            "id": f"{_ID_PREFIX[self.endpoint]}{self.job_id}",
            "object": names[self.endpoint],
            "created": self.created,
            "model": self.model,
        }


def body_from_reply(shape: ResponseShape, reply: Reply) -> dict[str, Any]:
    """The whole response of a finished (or cancelled, with what it has) job."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": _finish_reason(reply)}
    if shape.endpoint is Endpoint.CHAT:
        choice["message"] = {"role": "assistant", "content": reply.text}
        choice["logprobs"] = _chat_logprobs(reply.logprobs)
    else:
        choice["text"] = reply.text
        choice["logprobs"] = _completion_logprobs(reply.logprobs)
    return shape.envelope(chunk=False) | {
        "choices": [choice],
        "usage": reply.usage.model_dump(),
        "metrics": metrics_from_reply(reply),
    }


def metrics_from_reply(reply: Reply) -> dict[str, Any]:
    spec = reply.speculative
    steps = max(1, spec.num_spec_steps)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": spec.mean_acceptance_length,
            "draft_acceptance_rate": spec.draft_acceptance_rate,
            "acceptance_histogram": spec.acceptance_histogram,
            "num_spec_steps": spec.num_spec_steps,
            "num_accepted_draft_tokens": spec.num_accepted_draft_tokens,
            "num_draft_tokens": spec.num_draft_tokens,
            "num_spec_tokens": -(-spec.num_draft_tokens // steps),
        },
        "timings": reply.timings.model_dump(),
    }


def first_chunk(shape: ResponseShape) -> dict[str, Any]:
    """Chat streams open with the role."""
    return shape.envelope(chunk=True) | {
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    }


def chunk_from_delta(shape: ResponseShape, delta: Delta) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    if shape.endpoint is Endpoint.CHAT:
        choice |= {"delta": {"content": delta.text}, "logprobs": _chat_logprobs(delta.logprobs)}
    else:
        choice |= {"text": delta.text, "logprobs": _completion_logprobs(delta.logprobs)}
    return shape.envelope(chunk=True) | {"choices": [choice]}


def last_chunk(shape: ResponseShape, reply: Reply) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": _finish_reason(reply)}
    if shape.endpoint is Endpoint.CHAT:
        choice["delta"] = {}
    else:
        choice["text"] = ""
    return shape.envelope(chunk=True) | {"choices": [choice]}


def usage_chunk(shape: ResponseShape, reply: Reply) -> dict[str, Any]:
    return shape.envelope(chunk=True) | {
        "choices": [],
        "usage": reply.usage.model_dump(),
        "metrics": metrics_from_reply(reply),
    }


def _finish_reason(reply: Reply) -> str | None:
    return str(reply.finish_reason) if reply.finish_reason is not None else None


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {
        "content": [
            _spelled(item.token, item.logprob)
            | {"top_logprobs": [_spelled(top.token, top.logprob) for top in item.top_logprobs]}
            for item in logprobs
        ]
    }


def _spelled(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _completion_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    offsets, length = [], 0
    for item in logprobs:
        offsets.append(length)
        length += len(item.token)
    return {
        "tokens": [item.token for item in logprobs],
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [{top.token: top.logprob for top in item.top_logprobs} for item in logprobs],
        "text_offset": offsets,
    }


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An HTTP status and OpenAI's error object."""

    status: int
    error: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}

    def as_json(self) -> str:
        return json.dumps(self.body)


_STATUS_OF_CODE: Final[dict[str, tuple[int, str]]] = {
    ErrorCode.MODEL_NOT_FOUND: (404, "invalid_request_error"),
    ErrorCode.TOO_LARGE: (413, "invalid_request_error"),
    ErrorCode.TIMEOUT: (408, "timeout_error"),
    ErrorCode.IDEMPOTENCY_CONFLICT: (409, "invalid_request_error"),
    ErrorCode.CANCELLED: (499, "cancelled"),
    ErrorCode.ENGINE_ERROR: (500, "server_error"),
    ErrorCode.TOO_MANY_ATTEMPTS: (500, "server_error"),
    ErrorCode.POISON: (500, "server_error"),
    ErrorCode.ENTRY_DELETED: (500, "server_error"),
}


def error_from_code(code: str, message: str, field: str | None = None) -> ErrorBody:
    """A job's error; codes that are not in the table are the request's fault (400)."""
    status, kind = _STATUS_OF_CODE.get(code, (400, "invalid_request_error"))
    return ErrorBody(status, {"message": message, "type": kind, "param": field, "code": str(code)})


def error_from_rejection(error: JobRejected) -> ErrorBody:
    return error_from_code(error.code, str(error), error.field)


def error_from_full_queue(error: QueueFull) -> ErrorBody:
    return ErrorBody(
        429, {"message": str(error), "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    )
