"""The command line: help, exit codes, messages; nothing here starts a worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from edgellm_producer.wire import Reply, Status
from edgellm_worker.cli.commands import COMMANDS
from edgellm_worker.cli.main import main
from edgellm_worker.config import SECRETS, Settings, flag_name, variable_name
from edgellm_worker.engine.errors import BuildError, CapacityError, CheckpointError, DemandError, EngineError
from edgellm_worker.errors import ConfigError, ExitCode, exit_code
from edgellm_worker.queue.errors import ModelMismatch, QueueMisconfigured, QueueUnavailable
from tests.support.daemons import TINY

ROOT = Path(__file__).parents[2]


def run(*argv: str, environment: dict[str, str] | None = None) -> int:
    return main(list(argv), environment or {})


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_serve_help_names_every_setting_its_default_and_its_variable(capsys):
    text = help_of("serve", capsys)
    for field in Settings.model_fields:
        if field not in SECRETS:
            assert flag_name(field) in text
            assert variable_name(field) in text
    assert "default: 9108" in text
    assert "--redis-password " not in text, "a secret in a flag is in ps"
    for group in ("model:", "engine limits:", "batching:", "redis:", "operation:"):
        assert group in text


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_with_the_exit_codes(command, capsys):
    assert "exit codes: 0 done, 2" in help_of(command, capsys)


def test_the_list_of_commands_loads_no_command(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in text


EXITS = [
    (ConfigError(["x"]), ExitCode.OPERATOR),
    (CheckpointError(["x"]), ExitCode.OPERATOR),
    (CapacityError("x"), ExitCode.OPERATOR),
    (ModelMismatch("w", "a", "b"), ExitCode.OPERATOR),
    (QueueMisconfigured("x"), ExitCode.OPERATOR),
    (QueueUnavailable("x"), ExitCode.REDIS),
    (EngineError("x"), ExitCode.ENGINE),
    (DemandError("x"), ExitCode.OPERATOR),
    (BuildError("x"), ExitCode.ENGINE),
    (RuntimeError("x"), None),
]


@pytest.mark.parametrize(("error", "code"), EXITS, ids=lambda value: type(value).__name__)
def test_exit_codes(error, code):
    assert exit_code(error) == code


def test_all_mistakes_of_a_command_line_are_told_at_once(capsys):
    assert run("serve", "--max-batch-size", "0", "--queue", "a b") == ExitCode.OPERATOR
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("edgellm-worker: ") for line in lines)


def test_a_wrong_flag_is_the_operators_mistake():
    with pytest.raises(SystemExit) as ended:
        run("serve", "--max-batchsize", "4")
    assert ended.value.code == ExitCode.OPERATOR


def test_a_redis_that_is_not_there_is_exit_3(capsys):
    argv = ("check", "--model", str(TINY), "--redis-url", "redis://127.0.0.1:1", "--engine-home", "thread")
    assert run(*argv) == ExitCode.REDIS
    assert "edgellm-worker: Redis (--redis-url): " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--model", "/nowhere"), ExitCode.OPERATOR, "/nowhere"),
        (("--model", str(TINY), "--engine", "warp", "--embedded"), ExitCode.OPERATOR, "reference"),
        (("--model", str(TINY), "--embedded", "--embedded-dir", "/tmp/a b"), ExitCode.OPERATOR, "blanks"),
    ],
    ids=["no checkpoint", "no such engine", "embedded data path"],
)
def test_what_cannot_start_says_why(flags, code, words, capsys):
    assert run("check", *flags) == code
    assert words in capsys.readouterr().err


def test_the_console_script_is_this_main():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["edgellm-worker"] == "edgellm_worker.cli:main"


def test_the_demos_jobs_are_what_its_summary_speaks_of():
    from edgellm_worker.demo import demo_jobs

    jobs = demo_jobs()
    assert sum(job.is_greedy for job in jobs) > len(jobs) / 2
    assert sum(not job.is_greedy for job in jobs) >= 4
    assert sum(job.cancel for job in jobs) == 1
    assert {job.fields.get("priority", "normal") for job in jobs} == {"high", "normal", "low"}


def test_a_rejection_on_the_demos_screen_names_its_code():
    from edgellm_producer.wire import ErrorInfo
    from edgellm_worker.cli.demo import _ending

    reply = Reply(id="a", status=Status.REJECTED, error=ErrorInfo(code="model_not_found", message="x"))
    assert _ending(reply) == ("rejected model_not_found, 0 tokens", "yellow")


@pytest.mark.parametrize("argv", [("acl",), ("inspect", str(TINY)), ("plan", str(TINY), "--json")], ids=lambda a: a[0])
def test_a_reader_that_leaves_early_is_no_error(argv):
    """`edgellm-worker inspect MODEL | head`: the pipe is closed before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "import sys; from edgellm_worker.cli.main import main; sys.exit(main())", *argv]
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("budget", ["-1", "0", "nan", "inf"])
def test_a_budget_is_a_positive_number(budget, capsys):
    assert run("plan", str(TINY), "--budget-gib", budget) == ExitCode.OPERATOR
    assert "--budget-gib" in capsys.readouterr().err
