"""The transition table, run as a model under random interleavings of workers that crash, stall and come back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from edgellm_worker.queue.transitions import BY_EVENT, TRANSITIONS, Event, Fenced, Place
from tests.support.queue_model import PARKED, QueueModel

WORKERS = st.sampled_from(["w1", "w2"])
INDEX = st.integers(0, 5)


class QueueMachine(RuleBasedStateMachine):
    """Workers keep what they were given in hand, whether it is still theirs or not, and go on acting on it."""

    table = BY_EVENT

    def __init__(self) -> None:
        super().__init__()
        self.model = QueueModel(table=dict(self.table))
        self.accepted: list[str] = []
        self.deleted: set[str] = set()
        self.hands: dict[str, list[tuple[str, int]]] = {"w1": [], "w2": []}
        self.submit("", 0)

    def _pick(self, worker: str, index: int) -> tuple[str, int] | None:
        hand = self.hands[worker]
        return hand[index % len(hand)] if hand else None

    @rule(tenant=st.sampled_from(["", "a"]), again=st.integers(0, 9))
    def submit(self, tenant: str, again: int) -> None:
        job = f"j{len(self.accepted)}"
        assert self.model.submit(job, tenant)
        self.accepted.append(job)
        if again == 0:
            assert not self.model.submit(job, tenant), "a repeated submit is the same job"

    @rule(worker=WORKERS)
    def take(self, worker: str) -> None:
        if (taken := self.model.take(worker)) is not None:
            self.hands[worker].append(taken)

    @rule(worker=WORKERS, index=INDEX)
    def lease_ends(self, worker: str, index: int) -> None:
        """Its owner stalled, died, or is a drained worker's parking place."""
        if self.model.owners:
            entry = sorted(self.model.owners)[index % len(self.model.owners)]
            if (taken := self.model.reclaim(worker, entry)) is not None:
                self.hands[worker].append(taken)

    @rule(worker=WORKERS, index=INDEX, outcome=st.sampled_from(["ok", "retry", "kill", "release", "undo", "dead"]))
    def act(self, worker: str, index: int, outcome: str) -> None:
        picked = self._pick(worker, index)
        if picked is None:
            return
        job, entry = picked
        begun = self.model.begin(worker, job, entry)
        if begun in {"cancelled", "exhausted"}:
            self.model.finish(worker, job, entry, begun, dead=begun == "exhausted")
        elif outcome in {"ok", "dead"}:
            self.model.finish(worker, job, entry, outcome, dead=outcome == "dead")
        elif outcome in {"retry", "kill"}:
            self.model.retry(worker, job, entry, kill=outcome == "kill")
        else:
            self.model.release(worker, job, entry, begun=outcome == "undo")

    @rule(worker=WORKERS, index=INDEX, answers=st.booleans())
    def act_late(self, worker: str, index: int, answers: bool) -> None:
        """A worker that did not look whether the job is still its own ends it."""
        if (picked := self._pick(worker, index)) is not None:
            if answers:
                self.model.finish(worker, *picked, "ok")
            else:
                self.model.retry(worker, *picked)

    @rule(worker=WORKERS)
    def crash(self, worker: str) -> None:
        self.hands[worker].clear()

    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        self.model.cancel(self.accepted[index % len(self.accepted)])

    @rule()
    def sweep(self) -> None:
        self.model.promote_delayed()

    @rule(index=INDEX)
    def failover(self, index: int) -> None:
        if self.model.done:
            self.model.redeliver(sorted(self.model.done)[index % len(self.model.done)])

    @rule(index=INDEX)
    def delete(self, index: int) -> None:
        """An operator's hand, in the lane."""
        if self.model.lane:
            entry = sorted(self.model.lane)[index % len(self.model.lane)]
            self.deleted.add(self.model.lane[entry])
            self.model.delete(entry)

    @rule(index=INDEX)
    def check(self, index: int) -> None:
        job = self.accepted[index % len(self.accepted)]
        self.model.check(job, {worker for worker, hand in self.hands.items() if job in dict(hand)})

    @invariant()
    def no_job_is_lost_or_in_two_places(self) -> None:
        for job in self.accepted:
            places = self.model.places(job)
            if job not in self.model.done and (places or job not in self.deleted):
                assert len(places) == 1, f"{job} is in {places}"

    @invariant()
    def a_deleted_job_keeps_its_record_until_it_is_answered(self) -> None:
        """The record is what the check finds it by."""
        for job in self.deleted - set(self.model.done):
            assert job in self.model.records

    @invariant()
    def every_job_has_at_most_one_answer(self) -> None:
        for job, answers in self.model.visible.items():
            assert len(answers) == 1, f"{job} was answered {answers}"

    @invariant()
    def attempts_are_bounded(self) -> None:
        assert all(0 <= record.attempt <= 3 for record in self.model.records.values())

    def teardown(self) -> None:
        """One healthy worker is left: everything is answered, and nothing stays behind."""
        model = self.model
        for _ in range(20 * len(self.accepted) + 20):
            model.promote_delayed()
            for job in self.accepted:
                model.check(job, set())
            for entry in list(model.owners):
                if entry in model.owners and (taken := model.reclaim("last", entry)) is not None:
                    self._settle(*taken)
            if (taken := model.take("last")) is not None:
                self._settle(*taken)
        assert set(model.done) == set(self.accepted)
        assert not model.records
        assert not model.held
        assert not model.delayed
        assert not model.lane

    def _settle(self, job: str, entry: int) -> None:
        self.model.begin("last", job, entry)
        self.model.finish("last", job, entry, "ok")


SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


MUTANT_SETTINGS = settings(SETTINGS, max_examples=600, derandomize=True, phases=[Phase.generate])


def test_no_interleaving_loses_a_job_or_answers_it_twice() -> None:
    run_state_machine_as_test(QueueMachine, settings=SETTINGS)


@pytest.mark.parametrize("weaker", [Fenced.NOTHING, Fenced.OWNER])
def test_a_weaker_fence_is_found(weaker: Fenced) -> None:
    """The model bites: ownership is no fence, and none is none."""
    table = {**BY_EVENT, Event.FINISH: dataclasses.replace(BY_EVENT[Event.FINISH], check=weaker)}
    mutant = type("Mutant", (QueueMachine,), {"table": table})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(mutant, settings=MUTANT_SETTINGS)


@pytest.mark.parametrize("check", [Fenced.OWNER, Fenced.NOTHING])
def test_a_retry_is_its_owners_only(check: Fenced) -> None:
    """Without the check, a worker that comes back late puts a job into `delayed` that waits in its lane already."""
    model = QueueModel(table={**BY_EVENT, Event.RETRY: dataclasses.replace(BY_EVENT[Event.RETRY], check=check)})
    model.submit("j")
    job, entry = model.take("w1") or ("", 0)
    assert model.retry("w1", job, entry)
    model.promote_delayed()
    model.retry("w1", job, entry)
    assert (len(model.places(job)) == 1) is (check is Fenced.OWNER)


def test_every_event_has_exactly_one_row() -> None:
    assert [row.event for row in TRANSITIONS] == list(Event)


def test_done_is_final_and_everything_leads_there() -> None:
    assert all(Place.DONE not in row.sources for row in TRANSITIONS)
    reach = {Place.DONE}
    for _ in Place:
        reach |= {source for row in TRANSITIONS if row.targets & reach for source in row.sources}
    assert reach == set(Place)


def test_every_way_into_done_is_fenced() -> None:
    ways = [row for row in TRANSITIONS if Place.DONE in row.targets]
    assert {row.check for row in ways} == {Fenced.DONE_ABSENT}


def test_parked_is_no_worker() -> None:
    """A parked entry counts as not running: cancelling it answers at once."""
    model = QueueModel()
    model.submit("j")
    job, entry = model.take("w1") or ("", 0)
    assert model.release("w1", job, entry, begun=False)
    assert model.owners[entry] == PARKED
    assert model.cancel("j") == "cancelled"
