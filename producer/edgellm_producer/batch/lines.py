"""Input and output lines of a batch file (OpenAI Batch API reference; vLLM's run-batch reads and writes the same)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from edgellm_producer.errors import JobRejected
from edgellm_producer.openai.requests import Endpoint, OpenAiRequest, request_from_body
from edgellm_producer.openai.responses import ErrorBody, error_from_code, error_from_rejection
from edgellm_producer.wire import ErrorCode

MAX_LINE_BYTES: Final = 4 << 20
ID_PREFIX: Final = "batch_req_"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """`number` counts input lines from 1, empty ones included."""

    number: int
    custom_id: str
    request: OpenAiRequest


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that never becomes a job. `custom_id` is None where the line does not even have a usable one."""

    number: int
    custom_id: str | None
    error: ErrorBody


def parse_line(number: int, text: bytes) -> BatchLine | BadLine:
    custom_id: str | None = None
    try:
        fields = _fields(text)
        custom_id = _custom_id(fields)
        return BatchLine(number, custom_id, request_from_body(_endpoint(fields), _body(fields)))
    except JobRejected as error:
        return BadLine(number, custom_id, error_from_rejection(error))


def duplicate_line(line: BatchLine) -> BadLine:
    """A second line of the same custom_id: its answer could not be told from the first one's."""
    message = f"line {line.number} repeats custom_id {line.custom_id!r}"
    return BadLine(line.number, None, error_from_code(ErrorCode.INVALID_FIELD, message, "custom_id"))


def _fields(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_LINE_BYTES:
        raise JobRejected(ErrorCode.TOO_LARGE, f"line of {len(text)} bytes, limit {MAX_LINE_BYTES}")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobRejected(ErrorCode.MALFORMED, f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise JobRejected(ErrorCode.MALFORMED, "not a JSON object")
    return fields


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise JobRejected(ErrorCode.INVALID_FIELD, "a non-empty string is required", field="custom_id")
    return custom_id


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    body = fields.get("body")
    if not isinstance(body, dict):
        raise JobRejected(ErrorCode.INVALID_FIELD, "a JSON object is required", field="body")
    if body.get("stream"):
        raise JobRejected(ErrorCode.UNSUPPORTED_FIELD, "a batch line cannot stream", field="stream")
    return body


def _endpoint(fields: dict[str, Any]) -> Endpoint:
    if fields.get("method", "POST") != "POST":
        raise JobRejected(ErrorCode.INVALID_FIELD, "only POST is supported", field="method")
    try:
        return Endpoint(str(fields.get("url")))
    except ValueError:
        choices = " or ".join(Endpoint)
        raise JobRejected(ErrorCode.INVALID_FIELD, f"must be {choices}", field="url") from None


def success_line(run_id: str, line: BatchLine, body: dict[str, Any]) -> bytes:
    response = {"status_code": 200, "request_id": job_id(run_id, line.number), "body": body}
    return _output(run_id, line.number, line.custom_id, response, None)


def failure_line(run_id: str, number: int, custom_id: str | None, error: ErrorBody) -> bytes:
    response = {"status_code": error.status, "request_id": job_id(run_id, number), "body": error.body}
    brief = {"code": error.error["code"], "message": error.error["message"]}
    return _output(run_id, number, custom_id, response, brief)


def _output(run_id: str, number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    fields = {
        "id": ID_PREFIX + job_id(run_id, number),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # half a character in what the line says of itself goes back as it came
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def job_id(run_id: str, number: int) -> str:
    return f"{run_id}.{number}"


def answered_by(run_id: str, text: bytes) -> tuple[int, str | None]:
    """The input line that an output line answers, and its error's code; ValueError when it is no line of this run."""
    fields = json.loads(text)
    output_id, error = fields["id"], fields.get("error")
    prefix = f"{ID_PREFIX}{run_id}."
    if not isinstance(output_id, str) or not output_id.startswith(prefix):
        raise ValueError(f"{output_id!r} is not of run {run_id}")
    return int(output_id.removeprefix(prefix)), None if error is None else str(error["code"])
