"""The vendor engine behind the engine child's handle: a native call that hangs, leaks or dies costs its rows, no more."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edgellm_worker.engine.api import EngineFailure, EngineReady, FinishReason, StepReport
from edgellm_worker.engine.child.handle import ChildEngineHandle, ChildOptions
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.watchdog import WatchdogLimits
from edgellm_worker.engine.edgellm.rules import CompatKey, EdgeLlmRules
from edgellm_worker.engine.errors import RequestError
from tests.support.edgellm_setup import EOS, Collected, job, write_bundle

SCRIPT = Path(__file__).parents[1] / "support" / "edgellm_child.py"


@asynccontextmanager
async def running(tmp_path: Path, *, leaks: bool = False) -> AsyncIterator[ChildEngineHandle]:
    handle = await ChildEngineHandle.start(
        ChildOptions(
            load=Load("edgellm", "nowhere"),
            rules=EdgeLlmRules,
            command=(sys.executable, str(SCRIPT), str(write_bundle(tmp_path / "bundle"))),
            watchdog=WatchdogLimits(load_s=30, progress_s=3.0, prefill_s_per_1000_tokens=0),
            backoff_s=(0.05,),
            soft_rss_bytes=400_000_000 if leaks else None,
        )
    )
    try:
        yield handle
    finally:
        await handle.close()


async def answers(handle: ChildEngineHandle, *row_ids: int) -> Collected:
    got = Collected()
    while any(not got.updates.get(row_id) or got.finish(row_id) is None for row_id in row_ids):
        event = await asyncio.wait_for(handle.next_event(), 20)
        if isinstance(event, StepReport):
            got.take(event)
    return got


async def until(handle: ChildEngineHandle, kind: type) -> object:
    while not isinstance(event := await asyncio.wait_for(handle.next_event(), 20), kind):
        pass
    return event


async def test_a_batch_runs_in_one_call_and_the_parent_knows_the_rules(tmp_path: Path) -> None:
    async with running(tmp_path) as handle:
        assert not handle.traits.in_flight
        assert isinstance(handle.compat_key(job("fine")), CompatKey)
        with pytest.raises(RequestError):
            handle.validate(job("fine", min_p=0.5))
        for row_id in range(4):
            handle.add(row_id, job(f"fine {row_id}"))
        got = await answers(handle, 0, 1, 2, 3)
        assert all(got.tokens(row_id) == [10, 11, 12, EOS] for row_id in range(4))
        assert max(report.num_rows for report in got.reports if report.updates) == 4
        handle.add(4, job("fine", temperature=0.7))
        got = await answers(handle, 4)
        assert got.finish(4) is FinishReason.STOP
        assert got.updates[4][0].drafting_off is not None


@pytest.mark.parametrize(("word", "reason", "hung"), [("hang", "no progress", True), ("abort", "SIGABRT", False)])
async def test_a_native_call_that_never_returns_loses_its_rows_only(
    word: str, reason: str, hung: bool, tmp_path: Path
) -> None:
    async with running(tmp_path) as handle:
        handle.add(1, job("fine"))
        handle.add(2, job(word))
        failure = await until(handle, EngineFailure)
        assert isinstance(failure, EngineFailure)
        assert failure.row_ids == (1, 2)
        assert reason in failure.reason
        assert failure.hung is hung
        await until(handle, EngineReady)
        handle.add(3, job("fine"))
        assert (await answers(handle, 3)).finish(3) is FinishReason.STOP


async def test_a_leak_is_answered_by_a_new_process_between_batches(tmp_path: Path) -> None:
    async with running(tmp_path, leaks=True) as handle:
        first = handle.pid
        row_id = 0
        while handle.is_ready and row_id < 20:
            row_id += 1
            handle.add(row_id, job("leak"))
            assert (await answers(handle, row_id)).finish(row_id) is FinishReason.STOP
        await until(handle, EngineReady)
        assert handle.pid != first
        handle.add(100, job("fine"))
        assert (await answers(handle, 100)).finish(100) is FinishReason.STOP
