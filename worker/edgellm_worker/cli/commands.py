"""The commands. Each is a module of this package with `configure(parser)` and `run(arguments, environment) -> int`.

It is imported only when it is the one that runs, so that `--help` needs no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    module: str
    summary: str


COMMANDS: Final = (
    Command("demo", "edgellm_worker.cli.demo", "the whole product on this machine: embedded server, tiny model, jobs"),
    Command("serve", "edgellm_worker.cli.serve", "run the worker"),
    Command("check", "edgellm_worker.cli.check", "validate everything `serve` needs, then exit"),
)
