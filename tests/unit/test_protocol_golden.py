"""The bytes of protocol version 1, against a file that only a change of the protocol may change.

To write it anew after such a change: python -m tests.unit.test_protocol_golden
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from edgellm_producer.envelope import seal
from edgellm_producer.keys import GROUP, ID_PATTERN, NAME_PATTERN, Keys, Priority
from edgellm_producer.wire import (
    MAX_JOB_BYTES,
    VERSION,
    BatchInfo,
    Delta,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    Job,
    Reply,
    Speculative,
    Status,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
    decode_delta,
    decode_job,
    decode_reply,
    encode,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "protocol_v1.json"

JOBS: dict[str, dict[str, Any]] = {
    "minimal": {"id": "job-1", "prompt": "Hello"},
    "token_ids": {"id": "job-2", "prompt_token_ids": [1, 2, 300]},
    "everything": {
        "id": "01890a5d-ac96-774b-bcce-b302099a8057",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界 🌍"}],
        "model": "tiny",
        "max_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {17: -100.0, 42: 1.5},
        "seed": 9223372036854775807,
        "stop": ["\n\n", "END"],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 5,
        "response_format": {"type": "text"},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "priority": "high",
        "timeout_s": 12.5,
        "idempotency_key": "order-77",
        "tenant": "team-a",
        "reply_ttl_s": 600,
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "metadata": {"any": ["thing", 1, 2.5, None, True]},
    },
}
DELTA = Delta(
    attempt=2,
    offset_tokens=3,
    text="né",
    token_ids=[5, 6],
    logprobs=[
        TokenLogprob(
            token_id=5, token="n", logprob=-0.5, top_logprobs=[TopLogprob(token_id=5, token="n", logprob=-0.5)]
        )
    ],
)
REPLY = Reply(
    id="job-1",
    status=Status.FAILED,
    text="part",
    token_ids=[1, 2],
    seed=7,
    finish_reason=FinishReason.ERROR,
    error=ErrorInfo(code=ErrorCode.POISON, message="engine died twice", field=None),
    usage=Usage(prompt_tokens=5, completion_tokens=2, total_tokens=7),
    timings=Timings(queue_ms=1.5, total_ms=20.0),
    speculative=Speculative(method="mtp", acceptance_histogram=[1, 2], num_spec_steps=3),
    batch=BatchInfo(id="b-1", size=4, engine="reference"),
    attempt=3,
    worker="host-1-abcd",
    reply_ttl_s=3600,
)


def current() -> dict[str, Any]:
    keys = Keys("q")
    return {
        "version": VERSION,
        "group": GROUP,
        "max_job_bytes": MAX_JOB_BYTES,
        "id_pattern": ID_PATTERN,
        "name_pattern": NAME_PATTERN,
        "entry_fields": ["id", "job"],
        "reply_fields": ["delta", "done"],
        "keys_of_queue_q": {
            "lanes": list(keys.lanes),
            "job": keys.job("ID"),
            "reply": keys.reply("ID"),
            "done": keys.done("ID"),
            "cancel": keys.cancel("ID"),
            "dedup": keys.dedup("KEY"),
            "held": keys.held(Priority.LOW, "TENANT"),
            "tenants": keys.tenants(Priority.LOW),
            "worker": keys.worker("NAME"),
            "delayed": keys.delayed,
            "deadlines": keys.deadlines,
            "checks": keys.checks,
            "lease": keys.lease,
            "dead": keys.dead,
            "config": keys.config,
            "events": keys.events,
        },
        "job_fields": sorted(Job.model_fields),
        "reply_message_fields": sorted(Reply.model_fields),
        "delta_fields": sorted(Delta.model_fields),
        "statuses": [*Status],
        "finish_reasons": [*FinishReason],
        "error_codes": [*ErrorCode],
        "jobs": {name: {"fields": fields, "packed": seal(fields).packed.hex()} for name, fields in packable(JOBS)},
        "digest_of_everything": seal(JOBS["everything"]).digest,
        "delta": encode(DELTA).hex(),
        "reply": encode(REPLY).hex(),
    }


def packable(jobs: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """JSON has no integer keys: the bias is spelled as OpenAI bodies spell it, which means the same."""
    return [
        (
            name,
            {**fields, "logit_bias": {str(k): v for k, v in fields["logit_bias"].items()}}
            if "logit_bias" in fields
            else fields,
        )
        for name, fields in jobs.items()
    ]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("part", sorted(current()))
def test_the_protocol_is_what_the_file_says(golden: dict[str, Any], part: str) -> None:
    assert json.loads(json.dumps(current()[part])) == golden[part]


def test_the_files_bytes_are_read_as_they_were_meant(golden: dict[str, Any]) -> None:
    for name, fields in JOBS.items():
        job = decode_job(bytes.fromhex(golden["jobs"][name]["packed"]))
        assert job.model_dump(exclude_unset=True) == {"v": 1, **fields}
    assert decode_delta(bytes.fromhex(golden["delta"])) == DELTA
    assert decode_reply(bytes.fromhex(golden["reply"])) == REPLY


def test_a_reply_of_a_newer_worker_is_read_by_what_is_known(golden: dict[str, Any]) -> None:
    fields = msgpack.unpackb(bytes.fromhex(golden["reply"]))
    newer = msgpack.packb({**fields, "hologram": [1, 2], "usage": {**fields["usage"], "joules": 3}})
    assert decode_reply(newer) == REPLY


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(current(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
