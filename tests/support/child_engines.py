"""Engine processes that misbehave on request: ``python child_engines.py MODE FD``.

Every one uses the product's own child loop; only the engine behind it is made up. A row's tokens count up from its
prompt's last id. What a mode does, it does at the first step in which a row whose prompt starts with 666 is present,
so that tests decide by the prompt when the fault strikes. "slow" has no fault: its steps take 40 ms.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Hashable

from edgellm_worker.engine.api import (
    EngineLimits,
    EngineTraits,
    FinishReason,
    GenerationRequest,
    Phase,
    RowUpdate,
    StepReport,
)
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.process import prepare_process, run
from edgellm_worker.engine.errors import CheckpointError, EngineError, RequestError

TRIGGER = 666
LOG = logging.getLogger("edgellm_worker.engine.counting")
LIMITS = EngineLimits(4, 64, 128, 4, 3, 3, 1000)


class CountingEngine:
    """Writes prompt[-1] + 1, + 2, ... one token a step."""

    limits = LIMITS
    traits = EngineTraits("counting", in_flight=True, seeded=True, drafts_when_sampled=True, speculative_method="off")

    def __init__(self, mode: str, connection: socket.socket) -> None:
        self.mode = mode
        self.connection = connection
        self.rows: dict[int, tuple[GenerationRequest, int]] = {}
        self.hoard: list[bytes] = []

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return ()

    def validate(self, request: GenerationRequest) -> None:
        if len(request.prompt_token_ids) > self.limits.max_input_len:
            raise RequestError("prompt_token_ids", "too long")

    def add(self, row_id: int, request: GenerationRequest) -> None:
        self.validate(request)
        self.rows[row_id] = (request, 0)

    def remove(self, row_id: int) -> None:
        self.rows.pop(row_id, None)

    def step(self) -> StepReport:
        if self.mode == "slow":
            time.sleep(0.04)
        if any(request.prompt_token_ids[0] == TRIGGER for request, _ in self.rows.values()):
            self.misbehave()
        updates = []
        for row_id, (request, done) in list(self.rows.items()):
            finish = FinishReason.LENGTH if done + 1 == request.max_new_tokens else None
            updates.append(RowUpdate(row_id, (request.prompt_token_ids[-1] + done + 1,), finish_reason=finish))
            self.rows[row_id] = (request, done + 1)
            if finish:
                del self.rows[row_id]
        return StepReport(tuple(updates), len(updates), {Phase.VERIFY: 0.001}, 0, 0, 0)

    def misbehave(self) -> None:
        FAULTS[self.mode](self)

    def close(self) -> None:
        self.rows.clear()


def spin(_: CountingEngine) -> None:
    while True:
        pass


def die_in_mid_frame(engine: CountingEngine) -> None:
    engine.connection.sendall(b"EDG1\xff\x00\x00\x00abc")
    os._exit(1)


def run_out_of_memory(_: CountingEngine) -> None:
    """What an allocation gets where memory is limited and nobody is killed for it."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(8 << 30)


def report_a_broken_device(_: CountingEngine) -> None:
    raise EngineError("the device answered nonsense")


FAULTS = {
    "hang": lambda _: time.sleep(3600),
    "spin": spin,
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "exit0": lambda _: os._exit(0),
    "oom": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "memory": run_out_of_memory,
    "garbage": lambda engine: engine.connection.sendall(b"Segmentation fault (core dumped)\n" * 4),
    "truncated": die_in_mid_frame,
    "raise": report_a_broken_device,
    "bug": lambda _: 1 // 0,
    "leak": lambda engine: engine.hoard.append(b"x" * (64 << 20)),
    "logs": lambda _: LOG.warning("a step is odd: %d", 7),
    "stdout": lambda _: print("printed by a native library", flush=True),
}


def main(mode: str, fd: int) -> int:
    prepare_process()
    connection = socket.socket(fileno=fd)

    def load(_: Load) -> CountingEngine:
        if mode == "unloadable":
            raise CheckpointError(["a.safetensors: truncated", "config.json: no model_type"])
        if mode == "logs":
            LOG.info("building\nfor a while")
            LOG.debug("of no interest")
        if mode == "dies-loading":
            os._exit(3)
        return CountingEngine(mode, connection)

    return run(connection, load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
