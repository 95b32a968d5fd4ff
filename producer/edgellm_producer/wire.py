"""The wire protocol, version 1: what travels through Redis, as msgpack maps.

`Job` goes in, `Delta` and `Reply` come out. The models below are the whole truth about field names, types and bounds;
docs/protocol.md explains them and tests/golden/protocol_v1.json pins their bytes.

Two rules of evolution: an unknown *top-level* key of a job is rejected (`unsupported_field`), because ignoring a
sampling field would silently change the text; unknown keys of replies are ignored, so that an older client can read a
newer worker's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

import msgpack
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from edgellm_producer.errors import JobRejected, ProtocolError
from edgellm_producer.keys import ID_PATTERN, NAME_PATTERN, Priority

VERSION: Final = 1
MAX_JOB_BYTES: Final = 1 << 20
MAX_NESTING: Final = 32
MAX_STOP_STRINGS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_REGEX_CHARACTERS: Final = 4096
MAX_REPEATED_CHARACTERS: Final = 300
DEFAULT_MAX_TOKENS: Final = 256
DEFAULT_REPLY_TTL_S: Final = 3600


class Status(StrEnum):
    OK = "ok"
    REJECTED = "rejected"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class ErrorCode(StrEnum):
    """Why a job has no (complete) result. The first block is the producer's fault, the second the fleet's."""

    INVALID_FIELD = "invalid_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNSUPPORTED_VERSION = "unsupported_version"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    TEMPLATE_ERROR = "template_error"
    TIMEOUT = "timeout"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"

    ENGINE_ERROR = "engine_error"
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    POISON = "poison"
    ENTRY_DELETED = "entry_deleted"
    CANCELLED = "cancelled"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


def _bias_keys(value: object) -> object:
    """OpenAI bodies spell token ids as strings; both spellings are the same map."""
    if isinstance(value, dict):
        return {int(k) if isinstance(k, str) and k.isdigit() else k: v for k, v in value.items()}
    return value


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(strict=True, ge=-100, le=100)]],
    BeforeValidator(_bias_keys),
    Field(max_length=1024),
]
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    BeforeValidator(_one_or_many),
    Field(max_length=MAX_STOP_STRINGS),
]


_FORMAT_KEYS: Final = {"text": (), "json_object": (), "json_schema": ("json_schema",), "regex": ("regex",)}
"""Kinds of `response_format` (OpenAI's, and `regex`) with the key that each needs beside `type`."""


def check_response_format(value: dict[str, Any]) -> None:
    """Raise `ValueError` unless it is one of

    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}},
    {"type": "regex", "regex": "..."}; OpenAI's `name`, `description` and `strict` may stand beside `schema`.
    """
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise ValueError(f"type is {kind!r}, not one of {', '.join(_FORMAT_KEYS)}")
    expected = {"type", *_FORMAT_KEYS[kind]}
    if set(value) != expected:
        raise ValueError(
            f"{kind} takes the keys {', '.join(sorted(expected))}, not {', '.join(sorted(map(str, value)))}"
        )
    if kind == "regex" and not (isinstance(value["regex"], str) and 0 < len(value["regex"]) <= MAX_REGEX_CHARACTERS):
        raise ValueError(f"regex is not a string of 1 to {MAX_REGEX_CHARACTERS} characters")
    if kind == "json_schema":
        schema = value["json_schema"]
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise ValueError("json_schema has no object `schema`")
        unknown = sorted(set(schema) - {"schema", "name", "description", "strict"})
        if unknown:
            raise ValueError(f"json_schema has the unknown key {unknown[0]}")


class Job(_Model):
    """One generation job. Exactly one of `prompt`, `messages`, `prompt_token_ids` is given.

    Sampling fields left out (`None`) take the checkpoint's generation_config, then the documented constants.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    v: Literal[1] = VERSION
    id: Annotated[str, Field(pattern=ID_PATTERN)]
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=1 << 63)] | None = None
    stop: StopStrings | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    logprobs: Annotated[bool, Field(strict=True)] = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    stream: Annotated[bool, Field(strict=True)] = False
    priority: Priority = Priority.NORMAL
    timeout_s: Annotated[float, Field(strict=True, le=7 * 86400)] | None = None
    idempotency_key: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x20{}\x7f]+$")] | None = None
    tenant: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    reply_ttl_s: Annotated[int, Field(strict=True, ge=1, le=7 * 86400)] = DEFAULT_REPLY_TTL_S
    traceparent: Annotated[str, Field(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")] | None = None
    metadata: dict[str, Any] | None = None

    @field_validator("response_format")
    @classmethod
    def _of_one_kind(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            check_response_format(value)
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.prompt is not None) + (self.messages is not None) + (self.prompt_token_ids is not None) != 1:
            given = [n for n in ("prompt", "messages", "prompt_token_ids") if getattr(self, n) is not None]
            field = given[-1] if given else "prompt"
            raise PydanticCustomError(field, "exactly one of prompt, messages, prompt_token_ids is required")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            field = "tools" if self.tools else "chat_template_kwargs"
            raise PydanticCustomError(field, "tools and chat_template_kwargs need messages")
        return self

    def unbuilt_field(self) -> str | None:
        """The first field that asks for something this release cannot do, or None."""
        if isinstance(self.tool_choice, dict) or self.tool_choice not in {None, "auto", "none"}:
            return "tool_choice"
        return None


class Usage(_Model):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Timings(_Model):
    """All in milliseconds of the server's or the worker's monotonic time."""

    queue_ms: float = 0.0
    batch_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    generation_ms: float = 0.0
    total_ms: float = 0.0


class Speculative(_Model):
    """What drafting did for this job. `method` is "mtp", or why drafting was off ("off: ...").

    mean_acceptance_length is 1 + accepted / steps; acceptance_histogram[n] counts the steps that accepted n drafts.
    """

    method: str = "off"
    mean_acceptance_length: float = 1.0
    draft_acceptance_rate: float = 0.0
    acceptance_histogram: list[int] = []
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


class TopLogprob(_Model):
    token_id: int
    token: str
    logprob: float


class TokenLogprob(_Model):
    """The raw model distribution's log-probability of one output token (before temperature and filters)."""

    token_id: int
    token: str
    logprob: float
    top_logprobs: list[TopLogprob] = []


class ErrorInfo(_Model):
    code: str
    message: str
    field: str | None = None


class BatchInfo(_Model):
    """The admission group this job ran in."""

    id: str
    size: int
    engine: str


class Delta(_Model):
    """One streamed piece. `offset_tokens` counts from the attempt's first token; a new attempt starts at 0 again."""

    attempt: int
    offset_tokens: int
    text: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None


class Reply(_Model):
    """The one answer of a job (the `done` entry of its reply stream)."""

    v: int = VERSION
    id: str
    status: Status
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    seed: int | None = None
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    usage: Usage = Field(default_factory=Usage)
    timings: Timings = Field(default_factory=Timings)
    speculative: Speculative = Field(default_factory=Speculative)
    batch: BatchInfo | None = None
    attempt: int = 0
    worker: str = ""
    reply_ttl_s: int = DEFAULT_REPLY_TTL_S


def encode(message: BaseModel, **instead: Any) -> bytes:
    """One message as msgpack, without the fields that are None; `instead` are values that replace its own."""
    packed: bytes = msgpack.packb(given_fields(message) | instead, default=given_fields)
    return packed


def given_fields(message: BaseModel) -> dict[str, Any]:
    """`model_dump(exclude_none=True)` of one level, at half its cost: a packer that gets this as its `default` asks for
    the levels below.
    """
    if not isinstance(message, BaseModel):
        raise TypeError(f"{type(message).__name__} has no place in a message")
    values = message.__dict__
    return values if None not in values.values() else {name: v for name, v in values.items() if v is not None}


def nesting(value: object, depth: int = 0) -> int:
    """Levels of maps and lists, counted no further than MAX_NESTING + 1."""
    if depth > MAX_NESTING or not isinstance(value, dict | list):
        return depth
    inside = value.values() if isinstance(value, dict) else value
    return max((nesting(v, depth + 1) for v in inside if isinstance(v, dict | list)), default=depth + 1)


_STRINGS: Final = frozenset({str})
_CONTAINERS: Final = frozenset({dict, list})


def unpack(payload: bytes, *, limit: int = MAX_JOB_BYTES) -> dict[str, Any]:
    """Bytes to a plain map, bounded in size and nesting; `ProtocolError` for anything else."""
    if len(payload) > limit:
        raise ProtocolError(f"message of {len(payload)} bytes is over the limit of {limit}")
    try:
        value = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises a family of unrelated types
        raise ProtocolError(f"not msgpack: {type(error).__name__}") from error
    if not isinstance(value, dict) or not _STRINGS.issuperset(map(type, value)):
        raise ProtocolError("not a map with string keys")
    if not _CONTAINERS.isdisjoint(map(type, value.values())) and nesting(value) > MAX_NESTING:
        raise ProtocolError(f"nested deeper than {MAX_NESTING} levels")
    return value


def _short(text: str) -> str:
    """What a job says of itself is repeated in its answer and in logs: no more of it than a person would read."""
    return text if len(text) <= MAX_REPEATED_CHARACTERS else f"{text[:MAX_REPEATED_CHARACTERS]}..."


_valid_job: Final[Callable[[dict[str, Any]], Job]] = Job.__pydantic_validator__.validate_python
"""`Job.model_validate` without its options."""


def job_from(fields: dict[str, Any]) -> Job:
    """Validate a job; `JobRejected` names the first offending field in the words of the protocol."""
    version = fields.get("v", VERSION)
    if version != VERSION:
        raise JobRejected(
            ErrorCode.UNSUPPORTED_VERSION, f"version {_short(repr(version))}, this side speaks {VERSION}", field="v"
        )
    try:
        return _valid_job(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # An error of the whole job has no place; its type is the field to blame then (see `Job._whole`).
        field = ".".join(str(part) for part in first["loc"][:2]) or first["type"]
        named = field and _short(field)
        if first["type"] == "extra_forbidden":
            message = f"no field of protocol version {VERSION}"
            raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, message, field=named) from error
        message = _short(first["msg"].removeprefix("Value error, "))
        raise JobRejected(ErrorCode.INVALID_FIELD, message, field=named) from error


def decode_job(payload: bytes) -> Job:
    return job_from(unpack(payload))


def decode_reply(payload: bytes) -> Reply:
    return Reply.model_validate(unpack(payload, limit=1 << 30))


def decode_delta(payload: bytes) -> Delta:
    return Delta.model_validate(unpack(payload, limit=1 << 30))
