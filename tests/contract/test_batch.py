"""Batch files over a real server: every line answered once, whatever happens to the run."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgellm_producer import Producer
from edgellm_producer.batch.command import add_arguments, run_batch
from edgellm_producer.batch.lines import BadLine, BatchLine, parse_line
from edgellm_producer.batch.output import BatchFileError, BatchOutput, journal_path
from edgellm_producer.batch.progress import Progress
from edgellm_producer.errors import QueueUnreachable
from edgellm_producer.job import SubmittedJob
from edgellm_producer.wire import ErrorInfo, Reply, Status
from tests.support.instant_worker import echo, instant_worker

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}


def line(custom_id: str, url: str = "/v1/chat/completions", body: dict | None = None, **more) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": CHAT if body is None else body}
    return json.dumps(fields | more).encode() + b"\n"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


async def run(url: str, queue: str, source: Path, output: Path, *words: str) -> int:
    async with Producer(url, queue=queue) as producer:
        return await run_batch(producer, arguments(str(source), "-o", str(output), *words))


def answers(output: Path) -> dict[str | None, dict]:
    lines = [json.loads(text) for text in output.read_bytes().splitlines()]
    by_id = {fields["custom_id"]: fields for fields in lines}
    assert len(by_id) == len(lines), "a custom_id is answered twice"
    return by_id


async def test_every_line_is_answered_and_one_bad_line_stops_nothing(default_server, queue_name, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(
        line("a")
        + b"\n"
        + line("b", "/v1/completions", {"model": "tiny", "prompt": "abc"})
        + b"{not json\n"
        + line("c", body={**CHAT, "n": 2})
        + line("d", body={**CHAT, "temperature": -1})
        + line("e", "/v1/embeddings")
        + line("f")
        + line("half of one \ud83d", body={**CHAT, "\ud83d": 1})
        + line("half a character", body={**CHAT, "messages": [{"role": "user", "content": "\ud83d"}]})
    )
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output) == 1
    found = answers(output)
    assert set(found) == {"a", "b", None, "c", "d", "e", "f", "half a character", "half of one \ud83d"}
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "HELLO"
    assert found["a"]["response"]["status_code"] == 200
    assert found["a"]["error"] is None
    assert "speculative_decoding" in found["a"]["response"]["body"]["metrics"]
    assert found["b"]["response"]["body"]["choices"][0]["text"] == "ABC"
    assert found["c"]["response"]["body"]["error"]["param"] == "n"
    assert found["d"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["e"]["response"]["body"]["error"]["param"] == "url"
    assert found["half a character"]["response"]["body"]["error"]["param"] == "messages"
    assert not journal_path(output).exists()


async def test_all_succeeded_is_exit_code_0(default_server, queue_name, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(f"r{i}") for i in range(300)))
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output, "--window", "7") == 0
    assert len(answers(output)) == 300


async def test_a_failed_job_is_a_line_with_its_error(default_server, queue_name, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("good") + line("bad", body={**CHAT, "seed": 13}))

    def answer(delivery):
        if delivery.job.seed != 13:
            return echo(delivery)
        info = ErrorInfo(code="context_length_exceeded", message="too long", field="messages")
        return Reply(id=delivery.id, status=Status.REJECTED, error=info)

    async with instant_worker(default_server.url, queue_name, answer):
        assert await run(default_server.url, queue_name, source, output) == 1
    bad = answers(output)["bad"]
    assert bad["response"]["status_code"] == 400
    assert bad["error"] == {"code": "context_length_exceeded", "message": "too long"}


async def test_failures_are_told_the_first_of_each_kind_at_once_and_their_numbers_at_the_end(
    default_server, queue_name, tmp_path, capsys
):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {**CHAT, "temperature": -1}
    source.write_bytes(line("a") + line("b", body=bad) + line("c", body=bad) + b"{half a line\n")
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output) == 1
    told = capsys.readouterr().err
    assert told.count("batch: line 2 failed: invalid_field: ") == 1
    assert "line 3 failed" not in told
    assert "batch: line 4 failed: malformed: not JSON" in told
    assert "4/4 (100%) lines" in told
    assert told.endswith("batch: 3 of 4 lines failed: 2 invalid_field, 1 malformed\n")


async def test_an_interrupt_says_how_to_go_on_and_earlier_failures_count(default_server, queue_name, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("bad", body={**CHAT, "temperature": -1}) + line("good"))
    async with Producer(default_server.url, queue=queue_name) as producer:
        command = run_batch(producer, arguments(str(source), "-o", str(output)))
        running = asyncio.create_task(command)
        async with asyncio.timeout(10):
            while not output.exists() or not output.read_bytes():
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert "batch: interrupted: the same command goes on from here\n" in capsys.readouterr().err
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output) == 1
    told = capsys.readouterr().err
    assert "batch: resuming, 1 lines are answered already" in told
    assert told.endswith("batch: 1 of 2 lines failed: 1 invalid_field\n")
    assert answers(output)["good"]["error"] is None


async def test_a_batch_that_no_worker_sees_says_so(default_server, queue_name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("edgellm_producer.alone.TELL_AFTER_S", 0.0)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("a"))
    running = asyncio.create_task(run(default_server.url, queue_name, source, output))
    told = ""
    async with asyncio.timeout(10):
        while "no worker serves queue" not in told:
            await asyncio.sleep(0.01)
            told += capsys.readouterr().err
    async with instant_worker(default_server.url, queue_name):
        assert await running == 0


async def test_a_repeated_custom_id_is_refused_and_the_first_one_answered(default_server, queue_name, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("same") + line("same"))
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output) == 1
    found = answers(output)
    assert found["same"]["error"] is None
    assert "repeats custom_id 'same'" in found[None]["error"]["message"]


async def test_a_small_queue_is_waited_for(default_server, queue_name, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(f"r{i}") for i in range(40)))
    with default_server.client() as client:
        client.hset(f"edgellm:{{{queue_name}}}:config", "max_jobs", 3)
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output) == 0
    assert len(answers(output)) == 40


async def test_two_outages_are_each_waited_out(default_server, queue_name, tmp_path, monkeypatch):
    """Hours apart: the second one is not added to the first."""
    monkeypatch.setattr("edgellm_producer.batch.run._PAUSES_S", (0.0,))
    submit, clock = Producer.submit, time.monotonic
    outages = iter([0.0, 7200.0])
    shift = 0.0

    async def fails_twice(producer: Producer, prompt: str | None = None, **fields) -> SubmittedJob:
        nonlocal shift
        job = await submit(producer, prompt, **fields)
        if (later := next(outages, None)) is None:
            return job
        if later == 0.0:
            raise QueueUnreachable("away")
        shift = later
        monkeypatch.setattr(job, "reply", _away)
        return job

    monkeypatch.setattr(Producer, "submit", fails_twice)
    monkeypatch.setattr(
        "edgellm_producer.batch.run.time", SimpleNamespace(monotonic=lambda: clock() + shift, time=time.time)
    )
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("a"))
    async with instant_worker(default_server.url, queue_name):
        assert await run(default_server.url, queue_name, source, output, "--unreachable-s", "60") == 0


async def _away() -> Reply:
    raise QueueUnreachable("away")


async def test_a_finished_output_is_never_overwritten(default_server, queue_name, tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("a"))
    output.write_bytes(b"precious\n")
    assert await run(default_server.url, queue_name, source, output) == 2
    assert output.read_bytes() == b"precious\n"
    assert "move it away" in capsys.readouterr().err


def test_an_interrupted_output_is_resumed_and_its_half_line_cut(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("a") + line("b"))
    with BatchOutput.open(output, source) as first:
        first.write(json.dumps({"id": f"batch_req_{first.run_id}.1"}).encode() + b"\n")
        first.write(b'{"id": "batch_req_')
    with BatchOutput.open(output, source) as second:
        assert second.run_id == first.run_id
        assert second.answered == {1}
        assert not second.failures
    assert output.read_bytes().count(b"\n") == 1


def test_a_journal_of_another_input_is_refused(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("a"))
    with BatchOutput.open(output, source):
        pass
    source.write_bytes(line("b") + line("c"))
    with pytest.raises(BatchFileError, match="another input"), BatchOutput.open(output, source):
        pass


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"[]", None),
        (b'{"custom_id": 5}', "custom_id"),
        (b'{"custom_id": "a"}', "url"),
        (line("a", method="GET"), "method"),
        (line("a", body={**CHAT, "stream": True}), "stream"),
        (b'{"custom_id":"a","url":"/v1/completions","body":7}', "body"),
        (b"[" * 100_000, None),
    ],
)
def test_a_bad_line_names_its_field(text, field):
    parsed = parse_line(1, text)
    assert isinstance(parsed, BadLine)
    assert parsed.error.error["param"] == field


def test_published_examples_go_through_unchanged():
    """The example lines of OpenAI's Batch guide and of vLLM's run-batch documentation."""
    examples = Path(__file__).parents[1] / "golden" / "openai_batch_examples.jsonl"
    for number, text in enumerate(examples.read_bytes().splitlines(), 1):
        assert isinstance(parse_line(number, text), BatchLine), text


def test_progress_tells_rate_time_left_and_failures():
    progress = Progress(total=100, started_at=0.0, stream=sys.stderr, done=20, failures=Counter(a=2, b=1))
    assert progress.line(10.0) == "20/100 (20%) lines, 2.0/s, 0:00:40 left, 3 failed"


def test_progress_of_a_resumed_run_counts_all_lines_and_rates_its_own():
    progress = Progress(total=100, started_at=0.0, stream=sys.stderr, done=50, resumed=50)
    assert progress.line(10.0) == "50/100 (50%) lines, 0.0/s, 0 failed"
    progress.done += 10
    assert progress.line(10.0) == "60/100 (60%) lines, 1.0/s, 0:00:40 left, 0 failed"
