"""The batch former: scripted cases, then a state machine of its promises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edgellm_producer.keys import Priority
from edgellm_worker.batching import (
    Batch,
    BatchFormer,
    Candidate,
    CloseReason,
    EngineView,
    FormerConfig,
    Scheduling,
)

IDLE = EngineView(free_slots=4)


def former(linger_s: float = 1.0, ageing_s: float = 30.0, scheduling: Scheduling = Scheduling.IN_FLIGHT) -> BatchFormer:
    return BatchFormer(FormerConfig(linger_s, ageing_s, scheduling), name="b")


def candidate(turn: int, at: float = 0.0, **fields: Any) -> Candidate:
    return Candidate(id=f"j{turn}", turn=turn, enqueued_at=at, **{"priority": Priority.NORMAL, **fields})


def offered(box: BatchFormer, *candidates: Candidate) -> BatchFormer:
    for one in candidates:
        box.offer(one)
    return box


def ids(batch: Batch | None) -> list[str]:
    return [] if batch is None else [member.id for member in batch.members]


def running(key: object = (), free: int = 2) -> EngineView:
    return EngineView(free, ("shared", key))


class TestLinger:
    def test_linger_counts_from_the_oldest_jobs_enqueue_time(self):
        box = offered(former(), candidate(1, at=0.0), candidate(2, at=0.9))
        assert box.poll(0.99, IDLE) is None
        assert ids(box.poll(1.0, IDLE)) == ["j1", "j2"]

    def test_a_job_that_waited_longer_than_the_linger_goes_at_once(self):
        box = offered(former(), candidate(1, at=-5.0))
        batch = box.poll(0.0, IDLE)
        assert batch is not None
        assert (batch.reason, batch.wait_s) == (CloseReason.LINGER, 5.0)

    def test_a_full_batch_does_not_linger(self):
        box = offered(former(), *(candidate(i) for i in range(6)))
        batch = box.poll(0.0, IDLE)
        assert ids(batch) == ["j0", "j1", "j2", "j3"]
        assert batch is not None
        assert batch.reason is CloseReason.FULL

    def test_a_running_engine_never_lingers(self):
        batch = offered(former(), candidate(1)).poll(0.0, running())
        assert batch is not None
        assert batch.reason is CloseReason.JOIN

    def test_a_deadline_within_the_linger_closes_the_batch(self):
        batch = offered(former(), candidate(1), candidate(2, deadline_at=0.8)).poll(0.1, IDLE)
        assert batch is not None
        assert batch.reason is CloseReason.DEADLINE

    def test_next_wake_is_when_the_linger_ends_or_a_deadline_passes(self):
        box = offered(former(), candidate(1, at=0.0))
        assert box.next_wake(0.25, IDLE) == 0.75
        box.offer(candidate(2, at=0.0, deadline_at=0.5))
        assert box.next_wake(0.25, IDLE) == 0.25
        assert former().next_wake(0.0, IDLE) is None
        assert box.next_wake(0.25, EngineView(0, ("shared", ()))) == 0.25
        late = offered(former(), candidate(1, at=0.0))
        assert late.next_wake(2.0, EngineView(0)) is None, "no slot: nothing to wake up for, again and again"

    def test_linger_zero_sends_a_lone_job_at_once(self):
        assert ids(offered(former(linger_s=0.0), candidate(1)).poll(0.0, IDLE)) == ["j1"]


class TestKeys:
    def test_the_next_job_of_another_key_closes_the_batch(self):
        box = offered(former(), candidate(1, key="a"), candidate(2, key="b"), candidate(3, key="a"))
        batch = box.poll(0.0, IDLE)
        assert ids(batch) == ["j1", "j3"]
        assert batch is not None
        assert batch.reason is CloseReason.INCOMPATIBLE
        assert len(box) == 1

    def test_jobs_of_the_running_key_join_and_others_wait(self):
        box = offered(former(), candidate(1, key="b"), candidate(2, key="a"))
        assert ids(box.poll(0.0, running("a", free=3))) == ["j2"]
        assert box.poll(0.0, running("a", free=2)) is None

    def test_a_job_that_runs_alone_waits_for_an_idle_engine_and_gets_a_batch_of_its_own(self):
        box = offered(former(), candidate(1, runs_alone=True), candidate(2))
        assert ids(box.poll(0.0, running())) == ["j2"]
        batch = box.poll(0.0, IDLE)
        assert ids(batch) == ["j1"]
        assert batch is not None
        assert batch.reason is CloseReason.INCOMPATIBLE

    def test_nothing_joins_a_job_that_runs_alone(self):
        box = offered(former(), candidate(1, runs_alone=True))
        batch = box.poll(0.0, IDLE)
        assert batch is not None
        assert offered(box, candidate(2)).poll(9.0, EngineView(3, batch.key)) is None


class TestOrder:
    def test_lane_comes_before_turn_and_an_aged_job_counts_one_lane_higher(self):
        box = former(linger_s=0.0)
        offered(box, candidate(1, priority=Priority.LOW), candidate(2, priority=Priority.NORMAL, at=29.0))
        offered(box, candidate(3, priority=Priority.HIGH, at=30.0))
        assert ids(box.poll(29.5, EngineView(1))) == ["j3"]
        assert ids(box.poll(30.0, EngineView(1))) == ["j1"], "the low job is as old as the ageing bound"

    def test_within_a_lane_the_queues_turn_is_kept(self):
        box = offered(former(linger_s=0.0), candidate(2), candidate(1), candidate(3))
        assert ids(box.poll(0.0, IDLE)) == ["j1", "j2", "j3"]


def test_low_priority_odd_key_or_long_jobs_are_dispatched_within_the_stated_time():
    """vllm#20608, sglang#31954: a stream of the running key must not starve a job of another key."""
    box = offered(former(ageing_s=30.0), candidate(0, at=0.0, key="odd"))
    for now in range(31):
        turn = now + 1
        joined = offered(box, candidate(turn, at=float(now), key="a")).poll(float(now), running("a", free=4))
        assert ids(joined) == ([] if now == 30 else [f"j{turn}"]), "from 30 s on nothing overtakes it"
    batch = box.poll(31.0, IDLE)
    assert ids(batch) == ["j0"]


def test_batching_is_on_shows_in_size_and_close_reason():
    """tensorrtllm_backend#442: one row per batch must be visible, with why."""
    box = offered(former(linger_s=0.0), *(candidate(i) for i in range(3)))
    batch = box.poll(0.0, IDLE)
    assert batch is not None
    assert (batch.id, batch.size, batch.reason) == ("b-1", 3, CloseReason.LINGER)


def test_static_scheduling_admits_nothing_while_rows_run():
    box = offered(former(linger_s=0.0, scheduling=Scheduling.STATIC), candidate(1))
    assert box.poll(0.0, running()) is None
    assert ids(box.poll(0.0, IDLE)) == ["j1"]


def test_drain_gives_everything_back_once_and_says_so():
    box = offered(former(), candidate(1), candidate(2, key="b"))
    batch = box.drain(0.0)
    assert ids(batch) == ["j1", "j2"]
    assert batch is not None
    assert batch.reason is CloseReason.DRAIN
    assert box.drain(0.0) is None


def test_withdrawn_and_expired_jobs_are_not_dispatched():
    box = offered(former(linger_s=0.0), candidate(1), candidate(2, deadline_at=5.0), candidate(3))
    assert box.expired(4.9) == []
    assert box.expired(5.0) == ["j2"]
    assert box.withdraw("j2")
    assert not box.withdraw("j2")
    assert ids(box.poll(5.0, IDLE)) == ["j1", "j3"]


@pytest.mark.parametrize("free", [0, -1])
def test_without_a_free_slot_nothing_is_dispatched(free):
    assert offered(former(linger_s=0.0), candidate(1)).poll(9.0, EngineView(free)) is None


AGEING_S = 10.0
SLOTS = 3
LONGEST_RUN_S = 4.0


class FormerMachine(RuleBasedStateMachine):
    """An engine of three slots whose rows run at most 4 s, and any arrivals. Times move only in `advance`."""

    def __init__(self):
        super().__init__()
        self.former = former(linger_s=0.5, ageing_s=AGEING_S)
        self.now = 0.0
        self.turn = 0
        self.waiting: dict[str, Candidate] = {}
        self.running: dict[str, tuple[Candidate, float]] = {}
        self.key: object = None

    def view(self):
        return EngineView(SLOTS - len(self.running), self.key if self.running else None)

    @rule(
        key=st.sampled_from("ab"),
        priority=st.sampled_from(list(Priority)),
        age=st.floats(0, 12),
        alone=st.booleans(),
        timeout=st.none() | st.floats(1, 20),
    )
    def arrive(self, key, priority, age, alone, timeout):
        self.turn += 1
        one = Candidate(
            id=f"j{self.turn}",
            turn=self.turn,
            priority=priority,
            enqueued_at=self.now - age,
            key=key,
            deadline_at=None if timeout is None else self.now + timeout,
            runs_alone=alone and self.turn % 5 == 0,
        )
        self.former.offer(one)
        self.waiting[one.id] = one

    @rule(seconds=st.floats(0.05, 3))
    def advance(self, seconds):
        self.now += seconds
        ended = [job_id for job_id, (_, ends) in self.running.items() if ends <= self.now]
        for job_id in ended:
            del self.running[job_id]
        self.dispatch_all()

    @rule()
    def dispatch_all(self):
        while (batch := self.former.poll(self.now, self.view())) is not None:
            self.check(batch)
            self.key = batch.key
            for member in batch.members:
                del self.waiting[member.id]
                self.running[member.id] = (member, self.now + LONGEST_RUN_S)

    def check(self, batch):
        assert 1 <= batch.size <= SLOTS - len(self.running), "never more than free slots"
        assert len({member.batch_key for member in batch.members}) == 1
        if self.running:
            assert batch.key == self.key
            blocked = [c for c in self.waiting.values() if c.batch_key != self.key]
            aged = [c for c in blocked if self.now - c.enqueued_at >= AGEING_S]
            for member in batch.members:
                for other in aged:
                    assert self.place(member) < self.place(other), "an aged job was overtaken"
        elif batch.reason is CloseReason.LINGER:
            assert self.now >= min(m.enqueued_at for m in batch.members) + 0.5
        if any(m.runs_alone for m in batch.members):
            assert batch.size == 1
            assert not self.running

    def place(self, one):
        rank = list(Priority).index(one.priority)
        return max(0, rank - (self.now - one.enqueued_at >= AGEING_S)), one.turn

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.former.withdraw(job_id)
        del self.waiting[job_id]

    @invariant()
    def holds_exactly_what_was_not_dispatched(self):
        assert len(self.former) == len(self.waiting)

    @invariant()
    def an_idle_engine_is_never_left_waiting_past_the_linger(self):
        if self.waiting and not self.running:
            wake = self.former.next_wake(self.now, self.view())
            assert wake is not None
            assert wake <= 0.5

    def teardown(self):
        """Without arrivals everything is dispatched, in bounded time."""
        for _ in range(2 * len(self.waiting) + 4):
            self.now += LONGEST_RUN_S + 0.5
            self.running.clear()
            self.dispatch_all()
        assert not self.waiting


TestFormerMachine = FormerMachine.TestCase
TestFormerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
