"""How a job ended, as plain tuples: `wire.Reply` field by field, made and packed at a third of the model's cost.

A worker trusts its own counts, so nothing is checked here; readers check what they get. A test compares the names, and
the bytes with those of the model.
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack

from edgellm_producer.wire import (
    VERSION,
    BatchInfo,
    ErrorInfo,
    FinishReason,
    Reply,
    Status,
    TokenLogprob,
    encode,
    given_fields,
)


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(NamedTuple):
    queue_ms: float
    batch_wait_ms: float
    prefill_ms: float
    time_to_first_token_ms: float
    generation_ms: float
    total_ms: float


class Speculative(NamedTuple):
    method: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class Outcome(NamedTuple):
    """Of a job that ran."""

    id: str
    status: Status
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    seed: int
    finish_reason: FinishReason | None
    error: ErrorInfo | None
    usage: Usage
    timings: Timings
    speculative: Speculative
    batch: BatchInfo
    attempt: int


_FIELDS, _USAGE, _TIMINGS, _SPECULATIVE = Outcome._fields, Usage._fields, Timings._fields, Speculative._fields
_OPTIONAL = ("logprobs", "finish_reason", "error")


def packed(outcome: Outcome | Reply, *, worker: str, reply_ttl_s: int) -> bytes:
    """The `done` message of a job; a job that never ran has a `Reply`."""
    if isinstance(outcome, Reply):
        return encode(outcome, worker=worker, reply_ttl_s=reply_ttl_s)
    body: dict[str, object] = {"v": VERSION}
    body.update(zip(_FIELDS, outcome, strict=True))
    body["usage"] = dict(zip(_USAGE, outcome.usage, strict=True))
    body["timings"] = dict(zip(_TIMINGS, outcome.timings, strict=True))
    body["speculative"] = dict(zip(_SPECULATIVE, outcome.speculative, strict=True))
    for name in _OPTIONAL:
        if body[name] is None:
            del body[name]
    body["worker"] = worker
    body["reply_ttl_s"] = reply_ttl_s
    message: bytes = msgpack.packb(body, default=given_fields)
    return message
