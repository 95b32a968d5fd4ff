"""`edgellm-producer`: submit, result, status, cancel, dead, batch, gateway, script, schema.

A command is a row of COMMANDS: its name, what it adds to the parser, and a coroutine that is given a producer and
returns the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from edgellm_producer import protocol
from edgellm_producer.alone import alone_in_words, told_when_alone
from edgellm_producer.batch import command as batch
from edgellm_producer.client import Producer
from edgellm_producer.dead import DeadLetter, DeadLetters, UnknownDeadLetter
from edgellm_producer.errors import EdgellmError, JobError, JobRejected, ProtocolError, QueueUnreachable, UnknownJob
from edgellm_producer.gateway import command as gateway
from edgellm_producer.job import JobState, SubmittedJob, raise_for_status
from edgellm_producer.keys import Priority
from edgellm_producer.shell import expanded, explained, flush, leave_to_nobody, seconds, warn
from edgellm_producer.streaming import Restarted
from edgellm_producer.wire import Reply, Status


class ExitCode(IntEnum):
    DONE = 0
    NO_RESULT = 1  # the queue is full, or the job failed, expired or was cancelled
    OPERATOR = 2
    REDIS = 3
    INTERRUPTED = 130


Arguments = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Producer, Arguments], Awaitable[int]]
    has_actions: bool = False  # its actions take the connection's arguments then


FIELD_FLAGS: Final[tuple[tuple[str, type], ...]] = (
    ("model", str),
    ("max_tokens", int),
    ("temperature", float),
    ("top_p", float),
    ("top_k", int),
    ("min_p", float),
    ("repetition_penalty", float),
    ("frequency_penalty", float),
    ("presence_penalty", float),
    ("seed", int),
    ("top_logprobs", int),
    ("timeout_s", float),
    ("reply_ttl_s", int),
    ("idempotency_key", str),
    ("tenant", str),
)
"""Flags that are fields of the job under the same name."""


def password_of(arguments: Arguments) -> str | None:
    if arguments.redis_password_file is not None:
        return expanded(Path(arguments.redis_password_file)).read_text(encoding="utf-8").strip()
    return os.environ.get("EDGELLM_REDIS_PASSWORD")


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("queue")
    env = os.environ.get
    group.add_argument(
        "--redis-url",
        default=env("EDGELLM_REDIS_URL", "redis://127.0.0.1:6379"),
        help="redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// "
        "(EDGELLM_REDIS_URL; default: redis://127.0.0.1:6379)",
    )
    group.add_argument(
        "--redis-password-file",
        default=env("EDGELLM_REDIS_PASSWORD_FILE"),
        metavar="FILE",
        help="file that holds the password (EDGELLM_REDIS_PASSWORD_FILE, or the password in EDGELLM_REDIS_PASSWORD)",
    )
    group.add_argument("--queue", default=env("EDGELLM_QUEUE", "default"), help="(EDGELLM_QUEUE; default: default)")


_JSON_HELP: Final = "print the whole reply as one line of JSON"


def _submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt, or - to read it from standard input")
    parser.add_argument("--chat", action="store_true", help="send it as the user's message of a conversation")
    parser.add_argument("--system", help="the system message of that conversation")
    fields = parser.add_argument_group("job", "left out: the worker's default")
    for name, kind in FIELD_FLAGS:
        flag = "--" + name.replace("_", "-")
        fields.add_argument(flag, type=kind, metavar=kind.__name__.upper())
    fields.add_argument("--stop", action="append", metavar="STR", help="end before this text; may be given again")
    fields.add_argument("--ignore-eos", action="store_true", default=None)
    fields.add_argument("--logprobs", action="store_true", default=None)
    fields.add_argument("--priority", choices=[*Priority])
    output = parser.add_argument_group("output")
    output.add_argument(
        "--no-wait", action="store_true", help="print the job's id and leave (`result ID` gets its answer)"
    )
    output.add_argument("--no-stream", action="store_true", help="print the text at its end, in one piece")
    output.add_argument("--json", action="store_true", help=_JSON_HELP)


def job_fields(arguments: Arguments, text: str) -> dict[str, Any]:
    fields = {name: getattr(arguments, name) for name, _ in FIELD_FLAGS}
    for name in ("stop", "ignore_eos", "logprobs", "priority"):
        fields[name] = getattr(arguments, name)
    if not arguments.chat and arguments.system is None:
        return {**fields, "prompt": text}
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return {**fields, "messages": [*system, {"role": "user", "content": text}]}


async def _submit(producer: Producer, arguments: Arguments) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    streams = not (arguments.no_stream or arguments.json or arguments.no_wait)
    job = await producer.submit(**job_fields(arguments, text), stream=streams)
    if arguments.no_wait:
        print(job.id)
        return ExitCode.DONE
    try:
        async with told_when_alone(producer, warn):
            if arguments.json:
                return _print_whole(await job.reply())
            await _print_stream(job)
    except asyncio.CancelledError:
        await job.cancel()  # whoever interrupts the command does not want the text any more
        raise
    except QueueUnreachable:
        warn(f"the job lives on: edgellm-producer result {job.id}")
        raise
    return ExitCode.DONE


def _print_whole(reply: Reply) -> int:
    print(reply.model_dump_json())
    return ExitCode.DONE if reply.status is Status.OK else ExitCode.NO_RESULT


async def _print_stream(job: SubmittedJob) -> None:
    async for event in job.stream():
        if isinstance(event, Restarted):
            print(f"\n[attempt {event.attempt}: begins anew]", file=sys.stderr)
        print(event.text, end="", flush=True)
    print()


def _id_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the job's id")


def _result_arguments(parser: argparse.ArgumentParser) -> None:
    _id_argument(parser)
    parser.add_argument(
        "--timeout-s", type=seconds, metavar="FLOAT", help="how long to wait (default: until it is there)"
    )
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)


async def _result(producer: Producer, arguments: Arguments) -> int:
    async with told_when_alone(producer, warn):
        reply = await producer.job(arguments.id).reply(arguments.timeout_s)
    if arguments.json:
        return _print_whole(reply)
    print(raise_for_status(reply).text)
    return ExitCode.DONE


async def _status(producer: Producer, arguments: Arguments) -> int:
    status = await producer.status(arguments.id)
    words = [status.id, status.state.value]
    if status.status is not None:
        words.append(status.status)
    elif status.state is not JobState.UNKNOWN:  # the queue keeps no count of what is over
        words.append(f"attempt={status.attempt}")
    print(*words)
    if status.state is JobState.QUEUED and (alone := await alone_in_words(producer)) is not None:
        warn(alone)
    return ExitCode.OPERATOR if status.state is JobState.UNKNOWN else ExitCode.DONE


async def _cancel(producer: Producer, arguments: Arguments) -> int:
    print(await producer.cancel(arguments.id))
    return ExitCode.DONE


def _dead_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="one line each")
    show = actions.add_parser("show", help="one whole, as JSON")
    show.add_argument("entry", metavar="ENTRY", help="as `dead list` shows it")
    add_connection_arguments(listed)
    add_connection_arguments(show)
    for name, text in (("retry", "submit again, as a new job"), ("drop", "delete")):
        action = actions.add_parser(name, help=text)
        action.add_argument("entry", metavar="ENTRY", nargs="?", help="as `dead list` shows it")
        action.add_argument("--all", action="store_true", help="every dead letter")
        add_connection_arguments(action)


async def _dead(producer: Producer, arguments: Arguments) -> int:
    return await DEAD_ACTIONS[arguments.action](DeadLetters(producer), arguments)


def _dead_as_json(letter: DeadLetter) -> str:
    try:
        job: object = letter.job_fields()
    except ProtocolError as error:
        job = f"unreadable: {error}"
    shown = {
        "entry": letter.entry_id,
        "id": letter.id,
        "reason": letter.reason,
        "lane": letter.lane,
        "attempts": letter.attempts,
        "consumer": letter.consumer,
        "at_ms": letter.at_ms,
        "job": job,
    }
    return json.dumps(shown, indent=2, default=repr)


async def _dead_list(letters: DeadLetters, _: Arguments) -> int:
    async for letter in letters:
        print(f"{letter.entry_id} {letter.id or '-'} {letter.reason} attempts={letter.attempts} {letter.consumer}")
    return ExitCode.DONE


async def _dead_show(letters: DeadLetters, arguments: Arguments) -> int:
    print(_dead_as_json(await letters.get(arguments.entry)))
    return ExitCode.DONE


async def _dead_chosen(letters: DeadLetters, arguments: Arguments) -> list[str]:
    if arguments.all == (arguments.entry is not None):
        raise ValueError("give either an entry or --all")
    return [letter.entry_id async for letter in letters] if arguments.all else [arguments.entry]


async def _dead_retry(letters: DeadLetters, arguments: Arguments) -> int:
    """One that cannot be tried again is said so and left; the others go on."""
    code = ExitCode.DONE
    for entry in await _dead_chosen(letters, arguments):
        try:
            print((await letters.retry(entry)).id)
        except (ProtocolError, JobRejected) as error:
            print(f"{entry}: {error}", file=sys.stderr)
            code = ExitCode.NO_RESULT
    return code


async def _dead_drop(letters: DeadLetters, arguments: Arguments) -> int:
    for entry in await _dead_chosen(letters, arguments):
        await letters.drop(entry)
    return ExitCode.DONE


DEAD_ACTIONS: Final = {"list": _dead_list, "show": _dead_show, "retry": _dead_retry, "drop": _dead_drop}

COMMANDS: Final = (
    Command("submit", "enqueue a prompt and print the text as it comes", _submit_arguments, _submit),
    Command("result", "wait for a job's answer and print it", _result_arguments, _result),
    Command("status", "where a job is", _id_argument, _status),
    Command("cancel", "cancel a job, waiting or running", _id_argument, _cancel),
    Command("dead", "look at the jobs that were given up", _dead_arguments, _dead, has_actions=True),
    Command("batch", "run a file of OpenAI batch lines", batch.add_arguments, batch.run_batch),
    Command("gateway", "serve an OpenAI-compatible HTTP front", gateway.add_arguments, gateway.run_gateway),
    Command(
        "script",
        "print a server-side script, for other languages",
        protocol.add_script_arguments,
        protocol.print_script,
    ),
    Command("schema", "print the JSON Schema of the messages", protocol.no_arguments, protocol.print_schema),
)

_EXIT_CODES: Final[tuple[tuple[type[Exception], ExitCode], ...]] = (
    (QueueUnreachable, ExitCode.REDIS),
    (JobRejected, ExitCode.OPERATOR),
    (UnknownJob, ExitCode.OPERATOR),
    (UnknownDeadLetter, ExitCode.OPERATOR),
    (JobError, ExitCode.NO_RESULT),
    (EdgellmError, ExitCode.NO_RESULT),
    (ValueError, ExitCode.OPERATOR),
    (OSError, ExitCode.OPERATOR),
)


_EPILOG: Final = (
    "exit codes: 0 done, 1 no result (the queue is full, or a job failed, expired or was cancelled), "
    "2 the caller's mistake, 3 cannot reach Redis, 130 interrupted"
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edgellm-producer", description="Submit LLM jobs to an edgellm queue.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('edgellm-worker')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help, epilog=_EPILOG)
        command.add_arguments(child)
        if not command.has_actions:
            add_connection_arguments(child)
        child.set_defaults(run=command.run)
    return parser


async def _run(arguments: Arguments, password: str | None) -> int:
    async with Producer(arguments.redis_url, queue=arguments.queue, password=password) as producer:
        code: int = await arguments.run(producer, arguments)
        return code


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        code = asyncio.run(_run(arguments, password_of(arguments)))
        flush()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        leave_to_nobody()
        return ExitCode.DONE
    except tuple(kind for kind, _ in _EXIT_CODES) as error:
        known = next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
        subject = "Redis (--redis-url): " if known is ExitCode.REDIS else ""
        print(f"edgellm-producer: {subject}{explained(error)}", file=sys.stderr)
        return known
    return code


if __name__ == "__main__":
    sys.exit(main())
