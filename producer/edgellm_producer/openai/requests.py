"""Bodies of ``/v1/chat/completions`` and ``/v1/completions`` to job fields.

The mapping is one to one (OpenAI API reference; vLLM's extra sampling fields). A field that asks for something the
queue cannot do is refused by name, never dropped: a client that asked for two choices must not believe it got them.
Fields that ask for nothing (``n: 1``, ``echo: false``, null) and those that only concern OpenAI's own account handling
are accepted without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import ErrorCode


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class OpenAiRequest:
    """`fields` are keyword arguments of `Producer.submit`; the rest shapes the response."""

    endpoint: Endpoint
    fields: Mapping[str, Any]
    include_usage: bool = False


_SAME_NAME: Final = frozenset(
    {
        "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "logit_bias", "seed", "stop", "ignore_eos", "stream",
    }
)  # fmt: skip
_CHAT_SAME_NAME: Final = _SAME_NAME | {
    "messages", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice", "chat_template_kwargs",
}  # fmt: skip
_WITHOUT_EFFECT: Final = frozenset({"user", "store", "service_tier", "metadata", "safety_identifier"})
_ONLY_WHEN: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}
"""Fields honoured for these values alone."""


def _renamed(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: value}


def _completion_prompt(value: Any) -> dict[str, Any]:
    match value:
        case str():
            return {"prompt": value}
        case [str() as only]:
            return {"prompt": only}
        case [int(), *_]:
            return {"prompt_token_ids": value}
        case [[int(), *_] as only]:
            return {"prompt_token_ids": only}
    raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, "one prompt per request: a string or a list of ids", field="prompt")


def _completion_logprobs(value: Any) -> dict[str, Any]:
    if value is False:
        return {}
    if not isinstance(value, int):
        raise JobRejected(ErrorCode.INVALID_FIELD, "a number of candidates per token", field="logprobs")
    return {"logprobs": True, "top_logprobs": int(value)}


_CHAT_CONVERTED: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "max_completion_tokens": _renamed("max_tokens"),
}
_COMPLETION_CONVERTED: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "prompt": _completion_prompt,
    "logprobs": _completion_logprobs,
}
_TABLES: Final = {
    Endpoint.CHAT: (_CHAT_SAME_NAME, _CHAT_CONVERTED),
    Endpoint.COMPLETIONS: (_SAME_NAME, _COMPLETION_CONVERTED),
}


def request_from_body(endpoint: Endpoint, body: Mapping[str, Any]) -> OpenAiRequest:
    """`JobRejected` names the first field that cannot be honoured; ranges are checked by the job itself."""
    if not isinstance(body, Mapping):
        raise JobRejected(ErrorCode.MALFORMED, "not a JSON object", field="body")
    same_name, converted = _TABLES[endpoint]
    fields: dict[str, Any] = {}
    include_usage = False
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name == "stream_options":
            include_usage = _include_usage(value)
        elif name in converted:
            fields |= converted[name](value)
        elif name in same_name:
            fields[name] = value
        elif value not in _ONLY_WHEN.get(name, ()):
            raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, _refusal(name), field=name)
    return OpenAiRequest(endpoint, _with_metadata(fields, body), include_usage)


def _refusal(name: str) -> str:
    values = _ONLY_WHEN.get(name)
    return f"only {values[0]!r} is supported" if values else "not supported"


def _include_usage(value: Any) -> bool:
    if not isinstance(value, Mapping) or set(value) - {"include_usage"}:
        raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, "only include_usage is supported", field="stream_options")
    return bool(value.get("include_usage", False))


def _with_metadata(fields: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's `metadata` and `user` travel with the job, for whoever reads the queue."""
    metadata = {k: body[k] for k in ("user", "metadata") if body.get(k) is not None}
    return fields | ({"metadata": metadata} if metadata else {})
