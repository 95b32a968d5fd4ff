"""A job's fields into the bytes and arguments that the submit script takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgpack

from edgellm_producer.errors import JobRejected
from edgellm_producer.keys import new_job_id
from edgellm_producer.wire import MAX_JOB_BYTES, MAX_NESTING, VERSION, ErrorCode, Job, job_from, nesting

NOT_THE_BODY: Final = frozenset({"id", "idempotency_key", "traceparent"})
"""Fields that two submits of the same job may differ in."""


_PLACE: Final = {name: place for place, name in enumerate(Job.model_fields)}
NESTED: Final = frozenset({"messages", "tools", "response_format", "chat_template_kwargs", "metadata"})


class Envelope(NamedTuple):
    """A validated job, ready to send. `digest` is empty without an idempotency key: nothing is compared then."""

    job: Job
    packed: bytes
    digest: str

    def arguments(self) -> list[str | bytes | int]:
        job = self.job
        return [
            job.id,
            job.priority.value,
            job.tenant or "",
            "" if job.timeout_s is None else round(job.timeout_s * 1000),
            job.reply_ttl_s * 1000,
            job.idempotency_key or "",
            self.digest,
            self.packed,
        ]


def seal(fields: Mapping[str, Any]) -> Envelope:
    """Raises `JobRejected` naming the field. Fields that are None are left out; a missing id is made."""
    given = {name: value for name, value in fields.items() if value is not None}
    given.setdefault("v", VERSION)
    if "id" not in given:
        given["id"] = new_job_id()
    job = job_from(given)
    _check(job)
    body = _body(job)
    packed = _packed(body)
    if len(packed) > MAX_JOB_BYTES:
        raise JobRejected(ErrorCode.TOO_LARGE, f"{len(packed)} bytes packed, the limit is {MAX_JOB_BYTES}", field="job")
    return Envelope(job, packed, _digest(body) if job.idempotency_key is not None else "")


def _body(job: Job) -> dict[str, Any]:
    """What was given, as validated, in the order of the protocol's fields. A job holds plain values only, so this is
    `model_dump(exclude_unset=True)` at a fraction of its cost.
    """
    values = job.__dict__
    return {name: values[name] for name in _in_order(frozenset(job.model_fields_set))}


@lru_cache(maxsize=256)
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    """Jobs of one caller mostly give the same fields."""
    return tuple(sorted(names, key=_PLACE.__getitem__))


def _packed(body: Mapping[str, Any]) -> bytes:
    """Raises `JobRejected` naming the field that the wire cannot carry: half a surrogate pair (JSON can say one), an
    integer over 64 bits, an object.
    """
    try:
        return bytes(msgpack.packb(body))
    except (UnicodeEncodeError, OverflowError, TypeError):
        for name, value in body.items():
            try:
                msgpack.packb(value)
            except (UnicodeEncodeError, OverflowError, TypeError) as error:
                raise JobRejected(ErrorCode.INVALID_FIELD, f"cannot be sent: {error}", field=name) from error
        raise


def _check(job: Job) -> None:
    if (unbuilt := job.unbuilt_field()) is not None:
        raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, "not supported by this version", field=unbuilt)
    if job.timeout_s is not None and job.timeout_s <= 0:
        raise JobRejected(ErrorCode.TIMEOUT, f"{job.timeout_s} s have passed already", field="timeout_s")
    for name in NESTED & job.model_fields_set:
        if nesting(getattr(job, name)) >= MAX_NESTING:
            raise JobRejected(ErrorCode.INVALID_FIELD, f"nested deeper than {MAX_NESTING} levels", field=name)


def _digest(body: Mapping[str, Any]) -> str:
    compared = {name: value for name, value in body.items() if name not in NOT_THE_BODY}
    return hashlib.sha256(msgpack.packb(compared)).hexdigest()[:32]
