"""`edgellm-producer batch IN.jsonl -o OUT.jsonl`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from edgellm_producer.alone import told_when_alone
from edgellm_producer.batch.output import BatchFileError, BatchOutput, complete
from edgellm_producer.batch.progress import Progress
from edgellm_producer.batch.run import BatchOptions, BatchRun, BatchSummary
from edgellm_producer.client import Producer
from edgellm_producer.errors import QueueUnreachable
from edgellm_producer.keys import Priority, new_job_id
from edgellm_producer.shell import at_least_one, explained, seconds

SOME_FAILED: Final = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", help="OpenAI batch lines; - reads stdin")
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", default="-", help="- writes stdout (not resumable)")
    parser.add_argument(
        "--window", type=at_least_one, metavar="N", default=256, help="jobs in the queue at most (default %(default)s)"
    )
    parser.add_argument("--timeout-s", type=seconds, metavar="N", help="per job, from its submit")
    parser.add_argument(
        "--unreachable-s",
        type=seconds,
        metavar="N",
        default=300.0,
        help="how long to wait out an outage of the queue (default %(default)s)",
    )
    parser.add_argument("--model", help="model of lines that name none")
    parser.add_argument("--tenant")
    parser.add_argument("--priority", choices=[p.value for p in Priority])


async def run_batch(producer: Producer, args: argparse.Namespace) -> int:
    """Exit code 0 when every line succeeded, 1 when some failed, 2 when the files do not fit together."""
    options = BatchOptions(
        args.window, args.timeout_s, args.tenant, args.priority, args.model, unreachable_s=args.unreachable_s
    )
    source = None if args.input == "-" else Path(args.input)
    try:
        if args.output == "-":
            sink = BatchOutput(f"batch-{new_job_id()}", sys.stdout.buffer, is_durable=False)
            summary = await _run(producer, sink, source, options)
        else:
            with BatchOutput.open(Path(args.output), source) as sink:
                summary = await _run(producer, sink, source, options)
            complete(Path(args.output))
    except (QueueUnreachable, BrokenPipeError):  # OSErrors too, but not of the files
        raise
    except (BatchFileError, OSError) as error:
        sys.stderr.write(f"batch: {explained(error)}\n")
        return 2
    return SOME_FAILED if summary.failed else 0


async def _run(producer: Producer, sink: BatchOutput, source: Path | None, options: BatchOptions) -> BatchSummary:
    num_answered = len(sink.answered)
    total = None if source is None else _count_lines(source)
    progress = Progress(total, time.monotonic(), sys.stderr, num_answered, sink.failures, num_answered)
    if num_answered:
        progress.remark(f"resuming, {num_answered} lines are answered already")
    if sys.stderr.isatty():
        progress.show(time.monotonic())
    with _lines(source) as lines:
        try:
            async with told_when_alone(producer, progress.remark):
                return await BatchRun(producer, sink, progress, options).run(lines)
        except asyncio.CancelledError:
            if sink.is_durable:
                progress.remark("interrupted: the same command goes on from here")
            raise


@contextmanager
def _lines(source: Path | None) -> Iterator[Iterator[bytes]]:
    if source is None:
        yield iter(sys.stdin.buffer)
        return
    with source.open("rb") as file:
        yield file


def _count_lines(source: Path) -> int:
    with source.open("rb") as file:
        return sum(bool(line.strip()) for line in file)
