"""Parsing, exit codes, and the one place where an error becomes a message for people."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from edgellm_producer.shell import flush, leave_to_nobody
from edgellm_worker.cli.commands import COMMANDS, Command
from edgellm_worker.errors import ConfigError, ExitCode, exit_code

_EPILOG = (
    "exit codes: 0 done, 2 operator's mistake, 3 cannot reach Redis, 4 engine or build failure, "
    "129/130/143 ended by a signal after a clean drain"
)


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser, modules = _parser(given)
    arguments = parser.parse_args(given)
    try:
        code: int = modules[arguments.command].run(arguments, os.environ if environment is None else environment)
        flush()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        leave_to_nobody()
        return ExitCode.DONE
    except Exception as error:
        known = exit_code(error)
        if known is None:
            raise
        _explain(error, known)
        return known
    return code


def _parser(given: Sequence[str]) -> tuple[argparse.ArgumentParser, dict[str, _Module]]:
    parser = argparse.ArgumentParser(
        prog="edgellm-worker",
        description="Batched MTP speculative decoding, fed from a Redis stream.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('edgellm-worker')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, _Module] = {}
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.summary, description=command.summary, epilog=_EPILOG)
        if command.name in given:
            modules[command.name] = _Module(command)
            modules[command.name].configure(own)
    return parser, modules


class _Module:
    """A command's module, seen as what it must have."""

    def __init__(self, command: Command) -> None:
        for name, value in command.environment.items():
            os.environ.setdefault(name, value)
        module = importlib.import_module(command.module)
        self.configure = module.configure
        self.run = module.run


def _explain(error: Exception, code: ExitCode) -> None:
    """Redis's own words name neither Redis nor the setting that says where it is."""
    lines = error.problems if isinstance(error, ConfigError) else str(error).splitlines()
    subject = "Redis (--redis-url): " if code is ExitCode.REDIS else ""
    for line in lines or [type(error).__name__]:
        sys.stderr.write(f"edgellm-worker: {subject}{line}\n")
