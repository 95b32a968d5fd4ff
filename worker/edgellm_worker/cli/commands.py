"""The commands. Each is a module of this package with `configure(parser)` and `run(arguments, environment) -> int`.

It is imported only when it is the one that runs, so that `--help` needs no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Command:
    """`environment` is set, where it is not, before the command's module is imported."""

    name: str
    module: str
    summary: str
    environment: Mapping[str, str] = field(default_factory=dict)


# The tiny model's matrices are too small to share between threads, and BLAS threads that wait for each other on busy
# cores are far slower than one. BLAS reads these once, when it is loaded.
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

COMMANDS: Final = (
    Command(
        "demo",
        "edgellm_worker.cli.demo",
        "the whole product on this machine: embedded server, tiny model, jobs",
        _ONE_THREAD,
    ),
    Command("serve", "edgellm_worker.cli.serve", "run the worker"),
    Command(
        "inspect",
        "edgellm_worker.cli.inspect",
        "what a checkpoint is: quantization, namespaces, KV cache, MTP, problems",
    ),
    Command("build", "edgellm_worker.cli.build", "build an engine's bundle ahead of time"),
    Command("plan", "edgellm_worker.cli.plan", "device memory over batch sizes and draft lengths, before a build"),
    Command(
        "bench",
        "edgellm_worker.cli.bench",
        "sweep batch sizes and draft lengths of an engine, against the serialized run",
        _ONE_THREAD,
    ),
    Command("check", "edgellm_worker.cli.check", "validate everything `serve` needs, then exit"),
    Command("acl", "edgellm_worker.cli.acl", "the least rights on the server, as users for a worker and a producer"),
)
