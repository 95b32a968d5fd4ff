"""The transition table as a model: what Redis would hold, without Redis.

Containers are kept apart, as in Redis, so that a job *can* be in two places or in none; the invariants say that it is
not. Who may do what is taken from the table's `check`, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm_worker.queue.transitions import BY_EVENT, Event, Fenced, Place, Transition

PARKED = "parked"
MAX_ATTEMPTS = 3
MAX_KILLS = 2
WINDOW = 2


@dataclass
class Record:
    """`job:<id>`."""

    tenant: str
    entry: int | None = None
    attempt: int = 0
    kills: int = 0
    alone: bool = False
    begun_by: str = ""
    is_cancelled: bool = False


@dataclass
class QueueModel:
    table: dict[Event, Transition] = field(default_factory=lambda: dict(BY_EVENT))
    records: dict[str, Record] = field(default_factory=dict)
    lane: dict[int, str] = field(default_factory=dict)  # entry -> job, in order; pending ones too, as in a stream
    owners: dict[int, str] = field(default_factory=dict)  # the pending list
    held: list[str] = field(default_factory=list)
    delayed: set[str] = field(default_factory=set)
    done: dict[str, str] = field(default_factory=dict)
    visible: dict[str, list[str]] = field(default_factory=dict)  # every answer that readers ever saw
    dead: list[str] = field(default_factory=list)
    num_entries: int = 0

    def places(self, job: str) -> list[Place]:
        found = [Place.HELD] * self.held.count(job) + [Place.DELAYED] * (job in self.delayed)
        for entry, other in self.lane.items():
            if other == job:
                found.append(Place.PENDING if entry in self.owners else Place.LANE)
        return found + [Place.DONE] * (job in self.done)

    def _allows(self, event: Event, job: str, entry: int | None = None, consumer: str = "") -> bool:
        check = self.table[event].check
        if check is Fenced.OWNER:
            return entry is not None and self._holds(consumer, job, entry)
        if check is Fenced.DONE_ABSENT:
            return job not in self.done
        return True

    def _holds(self, consumer: str, job: str, entry: int) -> bool:
        holder = self.owners.get(entry)
        if holder is not None or entry in self.lane:
            return holder == consumer
        record = self.records.get(job)
        return record is not None and record.entry == entry and record.begun_by in {"", consumer}

    # Every method is one script.

    def submit(self, job: str, tenant: str = "") -> bool:
        if job in self.records or job in self.done:
            return False
        self.records[job] = Record(tenant)
        if tenant and self._in_lane(tenant) >= WINDOW:
            self.held.append(job)
        else:
            self._enter(job)
        return True

    def take(self, consumer: str) -> tuple[str, int] | None:
        for entry, job in list(self.lane.items()):
            if entry not in self.owners:
                self.owners[entry] = consumer
                return self._deliver(job, entry)
        return None

    def reclaim(self, consumer: str, entry: int) -> tuple[str, int] | None:
        """Called for entries whose lease is over, only."""
        if entry not in self.owners:
            return None
        job = self.lane[entry]
        record = self.records.get(job)
        if self.owners[entry] != PARKED and record is not None and record.begun_by:
            record.kills += record.alone
            record.alone, record.begun_by = True, ""
        self.owners[entry] = consumer
        return self._deliver(job, entry)

    def _deliver(self, job: str, entry: int) -> tuple[str, int] | None:
        record = self.records.get(job)
        if job in self.done or (record is not None and record.entry != entry):
            self._forget(job)
            self._drop(entry)
            return None
        return job, entry

    def begin(self, consumer: str, job: str, entry: int) -> str:
        if job in self.done:
            self._forget(job)
            self._drop(entry)
            return "lost"
        if not self._allows(Event.BEGIN, job, entry, consumer):
            return "lost"
        record = self.records[job]
        if record.is_cancelled:
            return "cancelled"
        if record.begun_by == consumer:
            return "started"
        if record.attempt >= MAX_ATTEMPTS or record.kills >= MAX_KILLS:
            return "exhausted"
        record.attempt += 1
        record.begun_by = consumer
        return "started"

    def finish(self, consumer: str, job: str, entry: int, status: str, *, dead: bool = False) -> bool:
        event = Event.DEAD_LETTER if dead else Event.FINISH
        num_visible = len(self.visible.get(job, []))
        is_visible = self._answer(event, job, f"{status} {consumer}")
        if dead and len(self.visible[job]) > num_visible:
            self.dead.append(job)
        self._drop(entry)
        return is_visible

    def release(self, consumer: str, job: str, entry: int, *, begun: bool) -> bool:
        """What has no entry any more goes back through `delayed`, with the envelope that the caller has."""
        if job not in self.records or not self._allows(Event.RELEASE, job, entry, consumer):
            return False
        record = self.records[job]
        if record.begun_by == consumer:
            record.begun_by = ""
            record.attempt -= begun
        if entry in self.lane:
            self.owners[entry] = PARKED
        else:
            self._delay(job, entry)
        return True

    def retry(self, consumer: str, job: str, entry: int, *, kill: bool = False) -> bool:
        if job in self.done:
            self._forget(job)
            self._drop(entry)
            return False
        if not self._allows(Event.RETRY, job, entry, consumer):
            return False
        record = self.records[job]
        record.kills += kill
        record.alone = True
        self._delay(job, entry)
        return True

    def cancel(self, job: str) -> str:
        if job in self.done:
            return "done"
        record = self.records.get(job)
        if record is None:
            return "unknown"
        owner = self.owners.get(record.entry) if record.entry is not None else None
        if owner not in {None, PARKED}:
            record.is_cancelled = True
            return "requested"
        self._answer(Event.CANCEL, job, "cancelled")
        return "cancelled"

    def promote_delayed(self) -> None:
        for job in sorted(self.delayed):
            self.delayed.discard(job)
            if self._allows(Event.PROMOTE_DELAYED, job):
                self._enter(job)
            else:
                self._forget(job)

    def delete(self, entry: int) -> None:
        """What an operator's XDEL or XTRIM does. The pending list forgets it as soon as somebody touches it."""
        self._drop(entry)

    def check(self, job: str, workers_that_have_it: set[str]) -> None:
        record = self.records.get(job)
        if record is None or record.entry is None or record.entry in self.lane:
            return
        if record.begun_by not in workers_that_have_it and self._answer(Event.CHECK, job, "deleted"):
            self.dead.append(job)

    def redeliver(self, job: str) -> None:
        """What a failover that lost the last writes does: an entry of an answered job is back, its record is not."""
        self.num_entries += 1
        self.lane[self.num_entries] = job

    def _answer(self, event: Event, job: str, answer: str) -> bool:
        if not self._allows(event, job):
            self._forget(job)
            return self.done[job] == answer
        self.done[job] = answer
        self.visible.setdefault(job, []).append(answer)
        self._forget(job)
        return True

    def _forget(self, job: str) -> None:
        record = self.records.pop(job, None)
        if record is None:
            return
        if job in self.held:
            self.held.remove(job)
        self.delayed.discard(job)
        if record.entry is not None:
            self._drop(record.entry)
            self._promote_held(record.tenant)

    def _enter(self, job: str) -> None:
        self.num_entries += 1
        self.lane[self.num_entries] = job
        self.records[job].entry = self.num_entries

    def _delay(self, job: str, entry: int) -> None:
        record = self.records[job]
        self._drop(entry)
        record.begun_by, record.entry = "", None
        self.delayed.add(job)
        self._promote_held(record.tenant)

    def _drop(self, entry: int) -> None:
        self.owners.pop(entry, None)
        self.lane.pop(entry, None)

    def _in_lane(self, tenant: str) -> int:
        return sum(record.tenant == tenant and record.entry is not None for record in self.records.values())

    def _promote_held(self, tenant: str) -> None:
        while tenant and self._in_lane(tenant) < WINDOW:
            job = next((job for job in self.held if self.records[job].tenant == tenant), None)
            if job is None:
                return
            self.held.remove(job)
            self._enter(job)
