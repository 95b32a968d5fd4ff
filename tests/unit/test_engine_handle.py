"""The engine in a thread: commands in order, events on the loop, failures that lose rows and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from edgellm_worker.engine.api import EngineFailure, EngineReady, FinishReason, StepReport
from edgellm_worker.engine.runtime.handle import ThreadEngineHandle
from tests.support.tiny_engine import WatchedExecutor, greedy, short_prompts, tiny_engine, watch

PROMPTS = short_prompts()


async def next_event(handle: ThreadEngineHandle):
    return await asyncio.wait_for(handle.next_event(), 30)


async def collect(handle: ThreadEngineHandle, row_ids: set[int]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {row_id: [] for row_id in row_ids}
    left = set(row_ids)
    while left:
        event = await next_event(handle)
        assert isinstance(event, StepReport)
        for update in event.updates:
            tokens[update.row_id] += update.token_ids
            if update.finish_reason is not None:
                left.discard(update.row_id)
    return tokens


async def test_rows_added_while_others_run_come_back_whole():
    handle = ThreadEngineHandle(tiny_engine(2, 3))
    assert handle.is_ready
    handle.add(1, greedy(PROMPTS[0], 20))
    await next_event(handle)
    handle.add(2, greedy(PROMPTS[1], 10))
    tokens = await collect(handle, {1, 2})
    assert tuple(tokens[2]) == PROMPTS[1].generated_ids[:10]
    await handle.close()
    assert not handle.is_ready


async def test_a_refused_row_comes_back_with_its_error_and_the_others_run():
    handle = ThreadEngineHandle(tiny_engine(1, 3))
    handle.add(1, greedy(PROMPTS[0], 8))
    handle.add(2, greedy(PROMPTS[1], 8))
    handle.add(3, replace(greedy(PROMPTS[1]), prompt_token_ids=()))
    refused, finished = {}, set()
    while len(refused) + len(finished) < 3:
        for update in (await next_event(handle)).updates:
            if update.finish_reason is FinishReason.ERROR:
                refused[update.row_id] = update.error
            elif update.finish_reason is not None:
                finished.add(update.row_id)
    assert finished == {1}
    assert "slots" in refused[2]
    assert "prompt_token_ids" in refused[3]
    await handle.close()


async def test_a_removed_row_is_not_heard_of_again():
    handle = ThreadEngineHandle(tiny_engine(2, 3))
    handle.add(1, greedy(PROMPTS[0], 60))
    handle.add(2, greedy(PROMPTS[1], 10))
    handle.remove(1)
    handle.remove(1)
    handle.remove(77)
    seen = set()
    done = False
    while not done:
        for update in (await next_event(handle)).updates:
            seen.add(update.row_id)
            done = update.row_id == 2 and update.finish_reason is not None
    handle.add(3, greedy(PROMPTS[2], 5))
    assert set(await collect(handle, {3})) == {3}
    await handle.close()


class _Breaks(WatchedExecutor):
    def change(self, output):
        if len(self.rounds) == 1:
            self.rounds.append(self.rounds[0])
            raise ZeroDivisionError("a broken step")
        return output


async def test_an_exception_of_a_step_loses_its_rows_and_the_engine_goes_on():
    engine = tiny_engine(2, 3)
    watch(engine, _Breaks)
    handle = ThreadEngineHandle(engine)
    handle.add(1, greedy(PROMPTS[0], 40))
    handle.add(2, greedy(PROMPTS[1], 40))
    events = []
    while not events or not isinstance(events[-1], EngineReady):
        events.append(await next_event(handle))
    failure = next(event for event in events if isinstance(event, EngineFailure))
    assert failure.row_ids == (1, 2)
    assert "a broken step" in failure.reason
    assert not failure.hung
    handle.add(3, greedy(PROMPTS[2], 12))
    assert tuple((await collect(handle, {3}))[3]) == PROMPTS[2].generated_ids[:12]
    await handle.close()


async def test_an_exception_while_a_row_is_added_refuses_that_row_and_frees_its_slot():
    engine = tiny_engine(1, 3)
    table, failures = engine._rows, [MemoryError("no room for row state")]
    add = table.add

    def add_and_fail_once(*given):
        row = add(*given)
        if failures:
            raise failures.pop()
        return row

    table.add = add_and_fail_once
    handle = ThreadEngineHandle(engine)
    handle.add(1, greedy(PROMPTS[0], 8))
    (refused,) = (await next_event(handle)).updates
    assert (refused.row_id, refused.finish_reason) == (1, FinishReason.ERROR)
    assert "no room" in refused.error
    handle.add(2, greedy(PROMPTS[1], 8))
    assert tuple((await collect(handle, {2}))[2]) == PROMPTS[1].generated_ids[:8]
    await handle.close()


async def test_close_drops_running_rows_and_ends_the_thread():
    handle = ThreadEngineHandle(tiny_engine(1, 3))
    handle.add(1, greedy(PROMPTS[0], 60))
    await next_event(handle)
    await handle.close()
    assert not handle.is_ready
    assert not handle._thread.is_alive()
