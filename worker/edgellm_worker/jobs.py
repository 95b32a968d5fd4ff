"""From a delivery to an engine request, or to the refusal that says which field is wrong.

Everything that can be wrong with a job is found here, before it joins a batch: a bad job never costs its neighbours
anything.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from edgellm_producer.errors import JobRejected
from edgellm_producer.wire import DEFAULT_MAX_TOKENS, ErrorCode, ErrorInfo, FinishReason, Job, Reply, Status
from edgellm_worker.engine.api import EngineHandle, EngineLimits, GenerationRequest
from edgellm_worker.engine.errors import RequestError
from edgellm_worker.queue.api import Delivery
from edgellm_worker.sampling_defaults import SamplingDefaults, resolve_sampling
from edgellm_worker.tokenizer import Tokenizer

SLOW_CHARACTERS: Final = 16_384


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What this worker serves, under which names; `worker` is its own name, told in every reply."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    worker: str


class PreparedJob(NamedTuple):
    """A job that can run here. `key` is the engine's compatibility key."""

    delivery: Delivery
    request: GenerationRequest
    key: Hashable

    @property
    def id(self) -> str:
        return self.delivery.job.id


def is_slow_to_prepare(job: Job) -> bool:
    """Templates and long prompts are prepared in a thread, so that the event loop keeps turning."""
    return job.messages is not None or len(job.prompt or "") > SLOW_CHARACTERS


def prompt_field(job: Job) -> str:
    return next(name for name in ("prompt", "messages", "prompt_token_ids") if getattr(job, name) is not None)


def deadline_at(delivery: Delivery) -> float | None:
    """The worker's monotonic time at which the job's timeout passes; never compares two machines' clocks."""
    if delivery.deadline_ms is None:
        return None
    return delivery.taken_at + (delivery.deadline_ms - delivery.taken_at_ms) / 1e3


def refusal(delivery: Delivery, worker: str, error: JobRejected) -> Reply:
    """The answer to a job that is wrong."""
    return Reply(
        id=delivery.id,
        status=Status.REJECTED,
        error=ErrorInfo(code=error.code, message=error.message, field=error.field),
        attempt=delivery.attempt,
        worker=worker,
        reply_ttl_s=delivery.job.reply_ttl_s,
    )


_UNSTARTED: Final = {
    Status.CANCELLED: (ErrorCode.CANCELLED, "cancelled before it started", FinishReason.CANCELLED),
    Status.EXPIRED: (ErrorCode.TIMEOUT, "its timeout passed before it started", None),
    Status.FAILED: (ErrorCode.TOO_MANY_ATTEMPTS, "no attempt is left", FinishReason.ERROR),
}


def unstarted(delivery: Delivery, worker: str, status: Status, *, code: ErrorCode | None = None) -> Reply:
    """The answer to a job that ends before its first token."""
    default_code, message, finish_reason = _UNSTARTED[status]
    return Reply(
        id=delivery.id,
        status=status,
        finish_reason=finish_reason,
        error=ErrorInfo(code=code or default_code, message=message),
        attempt=delivery.attempt,
        worker=worker,
        reply_ttl_s=delivery.job.reply_ttl_s,
    )


class Intake:
    """Thread-safe: `prepare` reads only."""

    def __init__(self, model: ServedModel, engine: EngineHandle) -> None:
        self._model = model
        self._engine = engine

    def prepare(self, delivery: Delivery) -> PreparedJob | Reply:
        """The job ready to run, or the reply that refuses it."""
        try:
            return self._prepared(delivery)
        except JobRejected as error:
            return refusal(delivery, self._model.worker, error)

    def _prepared(self, delivery: Delivery) -> PreparedJob:
        job = delivery.job
        self._check_model(job)
        unbuilt = job.unbuilt_field()
        if unbuilt is not None:
            raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, "not supported by this release", field=unbuilt)
        prompt = self._model.tokenizer.prompt_token_ids(job)
        limits = self._engine.limits
        _check_vocabulary(job, prompt, limits)
        request = GenerationRequest(
            prompt_token_ids=prompt,
            max_new_tokens=max_new_tokens(job, len(prompt), limits),
            sampling=resolve_sampling(job, self._model.defaults),
            eos_token_ids=frozenset() if job.ignore_eos else self._model.tokenizer.eos_token_ids,
            grammar=grammar_of(job),
        )
        try:
            self._engine.validate(request)
            return PreparedJob(delivery, request, self._engine.compat_key(request))
        except RequestError as error:
            raise JobRejected(error.code, error.message, field=error.field) from error

    def _check_model(self, job: Job) -> None:
        if job.model is not None and job.model not in self._model.names:
            raise JobRejected(
                ErrorCode.MODEL_NOT_FOUND, f"this queue serves {', '.join(self._model.names)}", field="model"
            )


def grammar_of(job: Job) -> str | None:
    """The engine's spelling of `response_format`; the wire has checked its shape."""
    match job.response_format:
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return json.dumps({"json_schema": schema})
        case {"type": "json_object"}:
            return json.dumps({"json_schema": {"type": "object"}})
        case {"type": "regex", "regex": regex}:
            return json.dumps({"regex": regex})
        case _:
            return None


def _check_vocabulary(job: Job, prompt: tuple[int, ...], limits: EngineLimits) -> None:
    if (highest := max(prompt)) >= limits.vocab_size:
        raise _outside(highest, limits, prompt_field(job))
    if job.logit_bias and (highest := max(job.logit_bias)) >= limits.vocab_size:
        raise _outside(highest, limits, "logit_bias")


def _outside(token_id: int, limits: EngineLimits, field: str) -> JobRejected:
    message = f"token id {token_id} is outside the vocabulary of {limits.vocab_size}"
    return JobRejected(ErrorCode.INVALID_FIELD, message, field=field)


def max_new_tokens(job: Job, num_prompt_tokens: int, limits: EngineLimits) -> int:
    """What the job asks for, or the default capped by the room there is. An explicit excess is refused."""
    room = limits.max_new_tokens(num_prompt_tokens)
    if num_prompt_tokens > limits.max_input_len or room < 1:
        raise JobRejected(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt_tokens} tokens, this worker takes {min(limits.max_input_len, limits.max_new_tokens(0) - 1)}",
            field=prompt_field(job),
        )
    if job.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if job.max_tokens > room:
        raise JobRejected(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{job.max_tokens} asked for, {room} fit after a prompt of {num_prompt_tokens} tokens",
            field="max_tokens",
        )
    return job.max_tokens
