"""The engine in a process of its own: every way it can fail ends in `EngineFailure`, then in a working engine again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import pytest

from edgellm_worker.engine.api import EngineFailure, EngineReady, FinishReason, GenerationRequest, StepReport
from edgellm_worker.engine.child.handle import ChildEngineHandle, ChildOptions
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.watchdog import WatchdogLimits
from edgellm_worker.engine.errors import CheckpointError, EngineError, RequestError
from edgellm_worker.engine.runtime.rules import SpeculativeRules
from tests.support.child_engines import LIMITS, TRIGGER

SCRIPT = Path(__file__).parents[1] / "support" / "child_engines.py"


class Rules:
    def __init__(self, limits):
        self.limits = limits

    def validate(self, request):
        if len(request.prompt_token_ids) > self.limits.max_input_len:
            raise RequestError("prompt_token_ids", "too long")

    def compat_key(self, request):
        return ()


def options(mode: str, **changes) -> ChildOptions:
    values = {
        "command": (sys.executable, str(SCRIPT), mode),
        "watchdog": WatchdogLimits(load_s=30, progress_s=1.0, prefill_s_per_1000_tokens=0),
        "backoff_s": (0.05,),
    }
    return ChildOptions(load=Load("counting", "nowhere"), rules=Rules, **(values | changes))


@asynccontextmanager
async def running(mode: str, **changes) -> AsyncIterator[ChildEngineHandle]:
    handle = await ChildEngineHandle.start(options(mode, **changes))
    try:
        yield handle
    finally:
        await handle.close()


def request(*prompt: int, max_new_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(prompt, max_new_tokens)


def oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def until(handle: ChildEngineHandle, kind: type) -> object:
    while not isinstance(event := await asyncio.wait_for(handle.next_event(), 20), kind):
        pass
    return event


async def tokens_of(handle: ChildEngineHandle, row_id: int) -> list[int]:
    """All tokens of one row, in order, to its end."""
    tokens: list[int] = []
    while True:
        event = await until(handle, StepReport)
        for update in event.updates:
            if update.row_id == row_id:
                tokens += update.token_ids
                if update.finish_reason:
                    return tokens


async def test_rows_run_and_the_child_closes_cleanly():
    async with running("hang") as handle:
        assert handle.limits == LIMITS
        assert handle.is_ready
        handle.add(1, request(10))
        assert await tokens_of(handle, 1) == [11, 12, 13]
        process = handle._process
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("mode", "reason", "hung"),
    [
        ("hang", "no progress", True),
        ("spin", "no progress", True),
        ("segfault", "SIGSEGV", False),
        ("exit0", "exited with code 0", False),
        ("oom", "SIGKILL, probably by the kernel for lack of memory", False),
        ("garbage", "garbage on the engine's pipe", False),
        ("truncated", "exited with code 1", False),
        ("raise", "the device answered nonsense", False),
        ("bug", "exited with code 1", False),
    ],
)
async def test_every_fault_loses_its_rows_and_the_engine_comes_back(mode, reason, hung):
    async with running(mode) as handle:
        first = handle.pid
        handle.add(1, request(10, max_new_tokens=100_000))
        handle.add(2, request(TRIGGER))
        failure = await until(handle, EngineFailure)
        assert failure.row_ids == (1, 2)
        assert reason in failure.reason
        assert failure.hung is hung
        assert not handle.is_ready
        await until(handle, EngineReady)
        assert handle.is_ready
        assert handle.pid != first
        handle.add(3, request(20))
        assert await tokens_of(handle, 3) == [21, 22, 23]


async def test_a_row_added_while_the_engine_is_down_comes_back_as_lost():
    async with running("exit0", backoff_s=(60.0,)) as handle:
        handle.add(1, request(TRIGGER))
        await until(handle, EngineFailure)
        handle.add(2, request(10))
        assert (await until(handle, EngineFailure)).row_ids == (2,)


async def test_a_refused_row_is_an_error_of_that_row_alone():
    async with running("hang") as handle:
        handle.add(1, request(10))
        handle.add(2, request(*range(LIMITS.max_input_len + 1)))
        updates = {}
        while len(updates) < 2:
            for update in (await until(handle, StepReport)).updates:
                if update.finish_reason:
                    updates[update.row_id] = update
        assert updates[1].finish_reason is FinishReason.LENGTH
        assert updates[2].finish_reason is FinishReason.ERROR
        assert "too long" in updates[2].error


async def test_a_leaking_engine_is_replaced_between_batches_and_loses_nothing():
    async with running("leak") as handle:
        base = handle.rss_bytes()
    async with running("leak", soft_rss_bytes=base + (100 << 20)) as handle:
        first = handle.pid
        handle.add(1, request(TRIGGER, max_new_tokens=4))
        handle.add(2, request(10, max_new_tokens=6))
        assert await tokens_of(handle, 2) == [11, 12, 13, 14, 15, 16]
        failure = await until(handle, EngineFailure)
        assert failure.row_ids == ()
        assert "resident memory" in failure.reason
        await until(handle, EngineReady)
        assert handle.pid != first


async def test_prints_of_native_code_do_not_reach_the_pipe():
    async with running("stdout") as handle:
        handle.add(1, request(TRIGGER))
        assert await tokens_of(handle, 1) == [TRIGGER + 1, TRIGGER + 2, TRIGGER + 3]


async def test_an_engine_that_does_not_load_in_time_says_what_to_do():
    with pytest.raises(EngineError, match=r"not loaded within 0\.01 s: `edgellm-worker build`.*--load-timeout-s"):
        await ChildEngineHandle.start(options("hang", watchdog=WatchdogLimits(load_s=0.01)))


async def test_an_idle_engine_is_never_hung():
    async with running("hang", watchdog=WatchdogLimits(load_s=30, progress_s=0.1)) as handle:
        handle.add(1, request(10))
        await tokens_of(handle, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.next_event(), 0.5)
        assert handle.is_ready


async def test_removing_the_last_row_disarms_the_watchdog():
    async with running("hang", watchdog=WatchdogLimits(load_s=30, progress_s=0.4)) as handle:
        handle.add(1, request(10, max_new_tokens=10**6))
        await until(handle, StepReport)
        handle.remove(1)
        await asyncio.sleep(0.8)
        while not handle._events.empty():
            assert isinstance(handle._events.get_nowait(), StepReport)
        assert handle.is_ready


async def test_what_loading_raises_in_the_child_is_raised_here():
    with pytest.raises(CheckpointError) as caught:
        await ChildEngineHandle.start(options("unloadable"))
    assert caught.value.problems == ("a.safetensors: truncated", "config.json: no model_type")
    with pytest.raises(EngineError, match="while loading: exited with code 3"):
        await ChildEngineHandle.start(options("dies-loading"))


async def test_the_kernel_is_told_to_kill_the_engine_before_the_worker():
    async with running("hang") as handle:
        assert oom_score_adj(handle.pid) > oom_score_adj(os.getpid())


async def test_the_reference_engine_runs_in_a_child_and_says_what_it_says_in_a_thread():
    recorded = json.loads((Path(__file__).parents[1] / "golden" / "tiny_qwen3_5_mtp.json").read_text())["prompts"][:2]
    model = str(resources.files("edgellm_worker") / "data" / "tiny-qwen3.5-mtp")
    handle = await ChildEngineHandle.start(ChildOptions(load=Load("reference", model), rules=SpeculativeRules))
    try:
        for row_id, prompt in enumerate(recorded):
            handle.add(row_id, GenerationRequest(tuple(prompt["prompt_ids"]), 8))
        said: dict[int, list[int]] = {0: [], 1: []}
        while min(len(tokens) for tokens in said.values()) < 8:
            for update in (await until(handle, StepReport)).updates:
                said[update.row_id] += update.token_ids
        assert said == {row_id: prompt["generated_ids"][:8] for row_id, prompt in enumerate(recorded)}
    finally:
        await handle.close()


async def test_what_the_engine_logs_is_written_by_the_worker_with_its_level_and_its_name(caplog):
    """While it loads and while it runs; on the pipe, so that lines of two processes never mix."""
    caplog.set_level("DEBUG", "edgellm_worker")
    async with running("logs") as handle:
        handle.add(1, request(TRIGGER))
        assert isinstance(await handle.next_event(), StepReport)
    ours = [(r.name, r.levelname, r.getMessage()) for r in caplog.records if r.name == "edgellm_worker.engine.counting"]
    assert ours[0] == ("edgellm_worker.engine.counting", "INFO", "building\nfor a while")
    assert ours[1] == ("edgellm_worker.engine.counting", "WARNING", "a step is odd: 7")
    assert {level for _, level, _ in ours} == {"INFO", "WARNING"}
