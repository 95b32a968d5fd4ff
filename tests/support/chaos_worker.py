"""A worker for chaos: the product's daemon, queue and engine child around the counting engine.

``python chaos_worker.py URL QUEUE`` serves until SIGTERM. SIGUSR1 moves this process's wall clock by five minutes, back
and forth. With EDGELLM_CHAOS_MUTANT=no-fence the script that publishes answers forgets to look whether there is one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from edgellm_producer import scripts as producer_scripts
from edgellm_worker.daemon import Daemon, DaemonParts
from edgellm_worker.engine.child.handle import ChildEngineHandle, ChildOptions
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.watchdog import WatchdogLimits
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.runtime.rules import SpeculativeRules
from edgellm_worker.queue import scripts as worker_scripts
from edgellm_worker.queue.config import QueueConfig
from edgellm_worker.queue.errors import QueueUnavailable
from edgellm_worker.queue.redis_queue import RedisQueue
from tests.support.daemons import config, metrics, model

CLOCK_STEP_S = 300.0
FENCE = "if done then"
ENGINE = (
    sys.executable,
    str(Path(__file__).with_name("child_engines.py")),
    os.environ.get("EDGELLM_CHAOS_ENGINE", "slow"),
)


class SteppingClock:
    """`time.time` of this process, which an operator or NTP may move."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.real = time.time

    def __call__(self) -> float:
        return self.real() + self.offset_s

    def step(self) -> None:
        self.offset_s = CLOCK_STEP_S if self.offset_s <= 0 else -CLOCK_STEP_S


def without_fence() -> None:
    """The mutant that the checker must catch."""
    read = producer_scripts.read_lua

    def read_mutant(package: str, name: str) -> str:
        source = read(package, name)
        if name == "common":
            assert source.count(FENCE) == 1
            return source.replace(FENCE, "if false then")
        return source

    producer_scripts.read_lua = read_mutant
    worker_scripts.read_lua = read_mutant


async def start_engine(options: ChildOptions) -> ChildEngineHandle:
    """A worker whose engine dies while it first loads exits with 4, to be started again by its supervisor. That is
    here: a fault of chaos may meet a worker that has just begun.
    """
    while True:
        try:
            return await ChildEngineHandle.start(options)
        except EngineError:
            await asyncio.sleep(0.1)


async def main(url: str, queue_name: str) -> None:
    queue = RedisQueue(
        QueueConfig(
            url=url, queue=queue_name, lease_s=1.0, reclaim_interval_s=0.2, max_attempts=1000, max_solo_kills=1000
        )
    )
    while True:
        try:
            await queue.open()
            break
        except QueueUnavailable:
            await asyncio.sleep(0.1)
    options = ChildOptions(
        load=Load("counting", ""),
        rules=SpeculativeRules,
        command=ENGINE,
        watchdog=WatchdogLimits(load_s=30, progress_s=5),
        backoff_s=(0.1, 0.2),
    )
    engine = await start_engine(options)
    settings = config(read_size=4, block_s=0.2, sweep_s=0.3, grace_s=5.0)
    daemon = Daemon(DaemonParts(queue, engine, model(), metrics(engine.limits), time.monotonic), settings)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop)
    try:
        await daemon.run()
    finally:
        await engine.close()
        await queue.close()


if __name__ == "__main__":
    clock = SteppingClock()
    time.time = clock
    signal.signal(signal.SIGUSR1, lambda *_: clock.step())
    if os.environ.get("EDGELLM_CHAOS_MUTANT") == "no-fence":
        without_fence()
    asyncio.run(main(sys.argv[1], sys.argv[2]))
