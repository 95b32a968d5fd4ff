"""The daemon over fakes: how jobs end early, engines that fail, Redis away, the stop order."""

from __future__ import annotations

import asyncio

import pytest

from edgellm_producer.wire import ErrorCode, FinishReason, Status
from tests.support.daemons import config, job, running
from tests.support.fake_engine import FakeEngine
from tests.support.memory_queue import MemoryQueue


@pytest.fixture
def queue():
    return MemoryQueue()


class TestCancelAndDeadline:
    async def test_cancelled_while_it_forms(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(linger_s=30.0)):
            queue.submit(job("a"))
            await queue.until(lambda: "a" in queue.held)
            queue.cancel("a")
            reply = await queue.reply("a")
        assert (reply.status, reply.text) == (Status.CANCELLED, "")
        assert not engine.added

    async def test_cancelled_between_forming_and_the_engine(self, queue):
        engine = FakeEngine()
        queue.submit(job("a"))
        queue.cancel("a")
        async with running(queue, engine):
            reply = await queue.reply("a")
        assert reply.status is Status.CANCELLED
        assert not engine.added

    async def test_cancelled_while_it_runs_keeps_its_text_and_frees_the_slot(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(sweep_s=60)):
            queue.submit(job("a", max_tokens=40))
            queue.submit(job("b", max_tokens=40))
            await queue.until(lambda: len(engine.rows) == 2)
            engine.step(2)
            queue.cancel("a")
            engine.step(1)
            reply = await queue.reply("a")
            assert len(engine.rows) == 1, "within a step"
        assert (reply.status, reply.finish_reason) == (Status.CANCELLED, FinishReason.CANCELLED)
        assert reply.error is not None
        assert reply.error.code == ErrorCode.CANCELLED
        assert 2 <= reply.usage.completion_tokens <= 3

    async def test_cancelled_while_publishing_keeps_its_answer(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            queue.down = True
            engine.step(4)
            await asyncio.sleep(0.05)
            queue.cancel("a")
            queue.down = False
            assert (await queue.reply("a")).status is Status.OK

    async def test_its_timeout_passes_while_it_runs(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(sweep_s=60)):
            queue.submit(job("a", max_tokens=40, timeout_s=0.1))
            await queue.until(lambda: engine.rows)
            engine.step(2)
            reply = await queue.reply("a")
            assert not engine.rows
        assert reply.status is Status.EXPIRED
        assert reply.error is not None
        assert reply.error.code == ErrorCode.TIMEOUT
        assert reply.usage.completion_tokens == 2

    async def test_its_timeout_passes_while_it_forms(self, queue):
        engine = FakeEngine(key_of=lambda request: request.max_new_tokens)
        async with running(queue, engine, config(sweep_s=60)):
            queue.submit(job("a", max_tokens=40))
            await queue.until(lambda: engine.rows)
            queue.submit(job("b", max_tokens=30, timeout_s=0.1))
            assert (await queue.reply("b")).status is Status.EXPIRED
        assert len(engine.added) == 1

    async def test_a_lost_lease_stops_the_row_without_a_word(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(sweep_s=60)):
            queue.submit(job("a", max_tokens=40))
            await queue.until(lambda: engine.rows)
            queue.steal("a")
            engine.step()
            await queue.until(lambda: not engine.rows)
        assert not queue.replies

    async def test_a_refused_delta_stops_the_row(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(sweep_s=60)):
            queue.submit(job("a", max_tokens=40, stream=True))
            await queue.until(lambda: engine.rows)
            del queue.held["a"]
            engine.step()
            await queue.until(lambda: not engine.rows)
        assert not queue.replies


class TestEngineFailures:
    async def test_a_failed_batch_comes_back_as_single_jobs(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            for n in range(3):
                queue.submit(job(f"j{n}"))
            await queue.until(lambda: len(engine.rows) == 3)
            engine.fail()
            await queue.until(lambda: len(queue.retried) == 3)
            assert all(not solo for _, _, solo in queue.retried)
            assert not queue.held, "nothing is read while the engine is down"
            engine.recover()
            for _ in range(3):
                await queue.until(lambda: engine.rows)
                assert len(engine.rows) == 1
                engine.step(4)
                await queue.until(lambda: not engine.rows or len(queue.replies) == 3)
            replies = [await queue.reply(f"j{n}") for n in range(3)]
        assert [reply.attempt for reply in replies] == [2, 2, 2]

    async def test_a_job_that_kills_the_engine_twice_alone_is_dead_lettered(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("poison"))
            for _ in range(2):
                await queue.until(lambda: engine.rows)
                engine.fail()
                engine.recover()
            reply = await queue.reply("poison")
        assert reply.error is not None
        assert (reply.status, reply.error.code) == (Status.FAILED, ErrorCode.POISON)
        assert queue.dead == {"poison": ErrorCode.POISON}

    async def test_a_job_without_attempts_left_is_dead_lettered(self, queue):
        queue.submit(job("tired"), attempt=3)
        async with running(queue, FakeEngine()):
            reply = await queue.reply("tired")
        assert reply.error is not None
        assert reply.error.code == ErrorCode.TOO_MANY_ATTEMPTS
        assert queue.dead == {"tired": ErrorCode.TOO_MANY_ATTEMPTS}

    async def test_a_hang_is_counted_as_one(self, queue):
        engine = FakeEngine()
        async with running(queue, engine) as daemon:
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            engine.fail(hung=True)
            await queue.until(lambda: queue.retried)
            engine.recover()
            await queue.until(lambda: engine.rows)
            metrics = daemon._metrics
            assert metrics.value("engine_hangs_total") == 1
            assert metrics.value("engine_restarts_total") == 1
            assert metrics.value("job_retries_total", reason="engine_hang") == 1


class TestRedisOutages:
    async def test_a_result_that_cannot_be_written_is_kept_and_written_once(self, queue):
        engine = FakeEngine()
        async with running(queue, engine):
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            queue.down = True
            engine.step(4)
            await asyncio.sleep(0.15)
            assert not queue.replies
            queue.down = False
            assert (await queue.reply("a")).status is Status.OK

    async def test_past_the_budget_the_lease_is_no_longer_renewed_but_the_result_is_kept(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(publish_budget_s=0.05)):
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            queue.down = True
            engine.step(4)
            await queue.until(lambda: "a" in queue.forgotten)
            queue.down = False
            assert (await queue.reply("a")).status is Status.OK

    async def test_a_batch_that_could_not_start_waits_and_starts_later(self, queue):
        engine = FakeEngine(at_once=True)
        async with running(queue, engine, config(linger_s=0.05)):
            queue.submit(job("a"))
            await queue.until(lambda: "a" in queue.held)
            queue.down = True
            await asyncio.sleep(0.2)
            assert not engine.added
            queue.down = False
            assert (await queue.reply("a")).status is Status.OK


class TestStopping:
    async def test_sigterm_while_a_batch_forms_hands_it_back_without_an_attempt(self, queue):
        """celery-batches#93"""
        engine = FakeEngine()
        async with running(queue, engine, config(linger_s=30.0)) as daemon:
            queue.submit(job("a"))
            queue.submit(job("b"))
            await queue.until(lambda: len(queue.held) == 2)
            daemon.stop()
        assert sorted(queue.released) == [("a", False), ("b", False)]
        assert queue.attempts == {"a": 0, "b": 0}
        assert not queue.replies

    async def test_running_jobs_finish_within_the_grace_and_nothing_new_is_read(self, queue):
        engine = FakeEngine()
        async with running(queue, engine) as daemon:
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            daemon.stop()
            queue.submit(job("late"))
            await asyncio.sleep(0.05)
            engine.step(4)
            assert (await queue.reply("a")).status is Status.OK
        assert [delivery.id for delivery in queue.lane] == ["late"]

    async def test_after_the_grace_the_rest_is_handed_back_without_an_attempt(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(grace_s=0.05)) as daemon:
            queue.submit(job("a", max_tokens=40))
            await queue.until(lambda: engine.rows)
            daemon.stop()
        assert queue.released == [("a", True)]
        assert queue.attempts == {"a": 0}
        assert not engine.rows

    async def test_a_second_signal_ends_the_grace_now(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(grace_s=1000.0)) as daemon:
            queue.submit(job("a", max_tokens=40))
            await queue.until(lambda: engine.rows)
            daemon.stop()
            daemon.stop()
        assert queue.released == [("a", True)]

    async def test_a_result_is_published_even_when_redis_is_away_at_the_end(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(grace_s=0.1, last_flush_s=5.0)) as daemon:
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            queue.down = True
            engine.step(4)
            daemon.stop()
            await asyncio.sleep(0.2)
            queue.down = False
        assert [reply.status for reply in queue.replies["a"]] == [Status.OK]

    async def test_without_redis_the_stop_ends_anyway(self, queue):
        engine = FakeEngine()
        async with running(queue, engine, config(grace_s=0.05, last_flush_s=0.1)) as daemon:
            queue.submit(job("a"))
            await queue.until(lambda: engine.rows)
            queue.down = True
            engine.step(4)
            daemon.stop()
        assert not queue.replies

    async def test_a_helper_that_breaks_hands_the_jobs_back_and_raises(self, queue, monkeypatch):
        engine = FakeEngine()

        async def broken():
            raise RuntimeError("a bug")

        async def life():
            async with running(queue, engine, config(sweep_s=0.02)):
                queue.submit(job("a", max_tokens=40))
                await queue.until(lambda: engine.rows)
                monkeypatch.setattr(queue, "sweep", broken)
                await queue.until(lambda: queue.released)

        with pytest.raises(RuntimeError, match="a bug"):
            await life()
        assert queue.released == [("a", True)]
