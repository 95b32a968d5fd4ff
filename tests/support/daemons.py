"""A daemon over fakes: `async with running(queue, engine) as daemon`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from edgellm_producer.wire import Job
from edgellm_worker.batching import FormerConfig, Scheduling
from edgellm_worker.daemon import Daemon, DaemonConfig, DaemonParts
from edgellm_worker.engine.api import EngineLimits
from edgellm_worker.jobs import ServedModel
from edgellm_worker.metrics import Metrics, MetricsShape
from edgellm_worker.sampling_defaults import SamplingDefaults
from edgellm_worker.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.memory_queue import MemoryQueue

TINY = Path(str(files("edgellm_worker") / "data" / "tiny-qwen3.5-mtp"))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def model() -> ServedModel:
    return ServedModel(("tiny",), tokenizer(), SamplingDefaults(temperature=0.0), "worker-1")


def metrics(limits: EngineLimits) -> Metrics:
    capacity = limits.max_batch_size * limits.max_kv_cache_capacity
    return Metrics(MetricsShape(limits.max_batch_size, limits.num_speculative_tokens, capacity, ("0",) * 5, ("4",) * 5))


def config(**changes: Any) -> DaemonConfig:
    """Linger 0 unless `linger_s` says otherwise."""
    former = FormerConfig(
        changes.pop("linger_s", 0.0), changes.pop("ageing_s", 30.0), changes.pop("scheduling", Scheduling.IN_FLIGHT)
    )
    return DaemonConfig(former, **{"read_size": 4, "block_s": 0.5, "sweep_s": 0.05, "grace_s": 5.0, **changes})


def job(job_id: str, **fields: Any) -> Job:
    if not {"messages", "prompt_token_ids"} & set(fields):
        fields = {"prompt": "def add(a, b):", **fields}
    return Job(id=job_id, **{"max_tokens": 4, **fields})


@asynccontextmanager
async def running(
    queue: MemoryQueue, engine: FakeEngine, settings: DaemonConfig | None = None
) -> AsyncIterator[Daemon]:
    """Stopped at the end, unless the test did; whatever its tasks raise fails the test."""
    parts = DaemonParts(queue, engine, model(), metrics(engine.limits), time.monotonic)
    daemon = Daemon(parts, settings or config())
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        if not daemon.is_draining:
            daemon.stop()
            daemon.stop()
        async with asyncio.timeout(10):
            await task
