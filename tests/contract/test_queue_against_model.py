"""The scripts against the model of the table: the same random steps on both, the same places and outcomes after each."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from edgellm_producer.envelope import seal
from edgellm_producer.keys import GROUP, Keys
from edgellm_producer.scripts import run_blocking
from edgellm_producer.scripts import script as producer_script
from edgellm_worker.queue.scripts import script as worker_script
from edgellm_worker.queue.transitions import Place
from tests.support.queue_model import PARKED, QueueModel
from tests.support.redis_server import RedisServer

WORKERS = st.sampled_from(["w1", "w2"])
INDEX = st.integers(0, 5)


class Pair(RuleBasedStateMachine):
    """Model entries are numbers, real ones stream ids: `entries` maps the one to the other."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.client = self.server.client(is_raw=True)
        self.keys = Keys(f"m-{secrets.token_hex(4)}")
        self.lane = self.keys.lane("normal")  # type: ignore[arg-type]
        self.model = QueueModel()
        self.accepted: list[str] = []
        self.entries: dict[int, bytes] = {}
        self.hands: dict[str, list[tuple[str, int]]] = {"w1": [], "w2": []}
        self.submit()

    def run_worker(self, name: str, *args: str | bytes | int) -> Any:
        return run_blocking(self.client, worker_script(name), self.keys.config, args)

    def take_row(self, consumer: str, reclaims: int, count: int = 1) -> list[Any]:
        rows: list[Any] = self.run_worker("take", consumer, count, 600_000, 30_000, 0, reclaims, 0)[1]
        return rows

    def learn(self) -> None:
        """The newest entry of the model is the newest of the stream."""
        if self.model.num_entries not in self.entries:
            newest = self.client.xrevrange(self.lane, count=1)
            if newest:
                self.entries[self.model.num_entries] = newest[0][0]

    def picked(self, worker: str, index: int) -> tuple[str, int, bytes] | None:
        hand = self.hands[worker]
        if not hand:
            return None
        job, entry = hand[index % len(hand)]
        return job, entry, self.entries[entry]

    @rule()
    def submit(self) -> None:
        job = f"j{len(self.accepted)}"
        arguments = seal({"id": job, "prompt": "x"}).arguments()
        for repeat in range(2):
            (reply,) = run_blocking(self.client, producer_script("submit"), self.keys.config, arguments)
            assert self.model.submit(job) is (repeat == 0)
            assert reply[0] == (b"known" if repeat else b"queued")
        self.accepted.append(job)
        self.learn()

    @rule(worker=WORKERS)
    def take(self, worker: str) -> None:
        rows = self.take_row(worker, 0)
        expected = self.model.take(worker)
        assert [(row[2].decode(), row[1]) for row in rows] == (
            [(expected[0], self.entries[expected[1]])] if expected else []
        )
        if expected:
            self.hands[worker].append(expected)

    @rule(worker=WORKERS, index=INDEX)
    def lease_ends(self, worker: str, index: int) -> None:
        if not self.model.owners:
            return
        entry = sorted(self.model.owners)[index % len(self.model.owners)]
        if self.model.owners[entry] == PARKED:
            return  # parked entries are claimed by any take: see `claim_parked`
        for other, owner in list(self.model.owners.items()):
            if owner == PARKED:
                self.client.xclaim(self.lane, GROUP, PARKED, 0, [self.entries[other]], idle=0, justid=True)
        real = self.entries[entry]
        self.client.xclaim(self.lane, GROUP, self.model.owners[entry], 0, [real], idle=700_000, justid=True)
        rows = self.run_worker("take", worker, 1, 600_000, 30_000, 0, 1, 0)[1]
        expected = self.model.reclaim(worker, entry)
        assert expected is not None
        assert (rows[0][2].decode(), rows[0][1]) == (expected[0], real)
        record = self.model.records[expected[0]]
        assert [int(rows[0][5]), int(rows[0][6]), rows[0][7] == b"1"] == [record.attempt, record.kills, record.alone]
        self.hands[worker].append(expected)

    @rule(worker=WORKERS, index=INDEX)
    def begin(self, worker: str, index: int) -> None:
        if (picked := self.picked(worker, index)) is not None:
            job, entry, real = picked
            (outcome,) = self.run_worker("begin", worker, 3, 2, "normal", real, job)
            assert outcome.decode() == self.model.begin(worker, job, entry)

    @rule(worker=WORKERS, index=INDEX, dead=st.booleans())
    def finish(self, worker: str, index: int, dead: bool) -> None:
        if (picked := self.picked(worker, index)) is not None:
            job, entry, real = picked
            reason = "poison" if dead else ""
            reply = self.run_worker(
                "finish", worker, 100, "normal", real, job, "ok", worker, 60_000, "r", reason, "e", 1
            )
            assert bool(reply[0]) is self.model_finish(worker, job, entry, dead)

    def model_finish(self, worker: str, job: str, entry: int, dead: bool) -> bool:
        """A repeat by the winner is told so by both."""
        return self.model.finish(worker, job, entry, "ok", dead=dead)

    @rule(worker=WORKERS, index=INDEX, begun=st.booleans())
    def release(self, worker: str, index: int, begun: bool) -> None:
        if (picked := self.picked(worker, index)) is not None:
            job, entry, real = picked
            released, deleted = self.run_worker("release", worker, int(begun), "normal", real, job)
            for _ in deleted:
                released += self.run_worker("retry", worker, "normal", real, job, 0, 0, 0, "", "what is in hand")
            assert bool(released) is self.model.release(worker, job, entry, begun=begun)

    @rule(worker=WORKERS, index=INDEX, kill=st.booleans())
    def retry(self, worker: str, index: int, kill: bool) -> None:
        if (picked := self.picked(worker, index)) is not None:
            job, entry, real = picked
            retried = self.run_worker("retry", worker, "normal", real, job, 0, 1, int(kill), "", "")
            assert bool(retried) is self.model.retry(worker, job, entry, kill=kill)

    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        job = self.accepted[index % len(self.accepted)]
        reply = run_blocking(self.client, producer_script("cancel"), self.keys.config, [job, "r"])
        assert reply[0].decode() == self.model.cancel(job)

    @rule(index=INDEX)
    def delete(self, index: int) -> None:
        """By hand, and gone from the pending list as well."""
        if self.model.lane:
            entry = sorted(self.model.lane)[index % len(self.model.lane)]
            self.client.xdel(self.lane, self.entries[entry])
            if self.has_group():
                self.client.xack(self.lane, GROUP, self.entries[entry])
            self.model.delete(entry)

    @rule(index=INDEX)
    def check(self, index: int) -> None:
        """No worker of this test says that it lives: what is in nobody's list is in nobody's hand."""
        job = self.accepted[index % len(self.accepted)]
        if self.model.delayed or not self.client.zadd(self.keys.checks, {job: 1}, xx=True, ch=True):
            return
        for name, lane, entry, *_ in self.run_worker("sweep", 1)[4]:
            assert name.decode() == job
            self.run_worker("finish", "w3", 100, lane, entry, job, "failed", "w3", 60_000, "r", "deleted", "", 0)
        self.model.check(job, set())

    @rule()
    def sweep(self) -> None:
        """One at a time, so that both sides number the new entries alike."""
        while self.model.delayed:
            self.run_worker("sweep", 1)
            promoted = {job.split()[0].decode() for job in self.client.zrange(self.keys.delayed, 0, -1)}
            (job,) = self.model.delayed - promoted
            rest, self.model.delayed = self.model.delayed - {job}, {job}
            self.model.promote_delayed()
            self.model.delayed = rest
            self.learn()

    @invariant()
    def every_job_is_where_the_model_says(self) -> None:
        pending = (
            {row["message_id"] for row in self.client.xpending_range(self.lane, GROUP, "-", "+", 1000)}
            if self.has_group()
            else set()
        )
        found: dict[str, list[Place]] = {job: [] for job in self.accepted}
        for entry, fields in self.client.xrange(self.lane):
            found[fields[b"id"].decode()].append(Place.PENDING if entry in pending else Place.LANE)
        for member in self.client.zrange(self.keys.delayed, 0, -1):
            found[member.split()[0].decode()].append(Place.DELAYED)
        for job in self.accepted:
            if self.client.exists(self.keys.done(job)):
                found[job].append(Place.DONE)
            answers = [fields for _, fields in self.client.xrange(self.keys.reply(job)) if b"done" in fields]
            assert len(answers) == len(self.model.visible.get(job, []))
        assert found == {job: self.model.places(job) for job in self.accepted}
        assert self.client.xlen(self.keys.dead) == len(self.model.dead)

    def has_group(self) -> bool:
        return bool(self.client.exists(self.lane)) and bool(self.client.xinfo_groups(self.lane))

    def teardown(self) -> None:
        if hasattr(self, "client"):
            for key in self.client.scan_iter(self.keys.prefix + "*", count=1000):
                self.client.delete(key)
            self.client.close()


def test_the_scripts_do_what_the_table_says(default_server: RedisServer) -> None:
    machine = type("PairOnServer", (Pair,), {"server": default_server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_scripts_do_what_the_table_says_at_length(server: RedisServer) -> None:
    machine = type("PairOnServer", (Pair,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=1000, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
