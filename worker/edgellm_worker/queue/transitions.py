"""Every transition of a job in Redis, as one table.

A job is in exactly one place at a time:

    held ──promote──▶ lane ──take──▶ pending ──finish──▶ done
      ▲                ▲             ▲ │ │ │
      └────submit──────┘     release─┘ │ │ └──dead-letter──▶ done, and a copy in `dead`
                       ▲     reclaim   │ ▼
                       └──promote──── delayed

Each row below is one Lua script, or one branch of one: the server runs it whole or not at all, so between two rows a
process may die anywhere and the next owner finds a state of this drawing. The *fence* is `done:<id>`, written once with
NX: the first answer wins, whoever owns the entry. Ownership alone is never a fence, because a failover can lose the
pending list; an acknowledgement alone is never a fence, because XACK does not check who sends it.

tests/support/queue_model.py runs this table as a model: it takes its checks from here, so a row that promises too
little is found by Hypothesis before any script is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Event(StrEnum):
    SUBMIT = "submit"
    TAKE = "take"
    RECLAIM = "reclaim"
    BEGIN = "begin"
    RENEW = "renew"
    DELTA = "delta"
    FINISH = "finish"
    RELEASE = "release"
    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    CANCEL = "cancel"
    EXPIRE = "expire"
    PROMOTE_DELAYED = "promote_delayed"
    PROMOTE_HELD = "promote_held"
    REAP_CONSUMER = "reap_consumer"
    CHECK = "check"


class Place(StrEnum):
    """Where a job is, and what says so in Redis."""

    ABSENT = "absent"  # neither job:<id> nor done:<id>
    HELD = "held"  # its id in held:<lane>:<tenant>, its envelope in job:<id>
    LANE = "lane"  # an entry of jobs:<lane> that no consumer has
    PENDING = "pending"  # an entry that a consumer has: its idle time is the lease
    DELAYED = "delayed"  # a member of `delayed`
    DONE = "done"  # done:<id>


class Fenced(StrEnum):
    """What a script checks before it acts."""

    NOTHING = "nothing"
    OWNER = "the caller holds the entry in the pending list; or it was deleted from outside, and no other began the job"
    DONE_ABSENT = "done:<id> does not exist (SET NX)"


@dataclass(frozen=True, slots=True)
class Transition:
    """`check` is what the script verifies of the caller; `precondition` what else must hold; `effect` what it writes.

    A row without places moves no job.
    """

    event: Event
    sources: frozenset[Place]
    targets: frozenset[Place]
    check: Fenced
    precondition: str
    effect: str


def _row(event: Event, places: tuple[str, str], check: Fenced, precondition: str, effect: str) -> Transition:
    sources, targets = (frozenset(Place(word) for word in side.split()) for side in places)
    return Transition(event, sources, targets, check, precondition, effect)


TRANSITIONS: Final = (
    _row(
        Event.SUBMIT,
        ("absent", "lane held"),
        Fenced.NOTHING,
        "dedup:<key> absent, or its job is gone; lanes + held + delayed < max_jobs; tenant under its own limit; "
        "job:<id> and done:<id> absent (a repeated submit finds them and changes nothing)",
        "SET dedup PX; HSET job:<id>; ZADD deadlines; XADD lane, or RPUSH held when the tenant has W entries there",
    ),
    _row(
        Event.TAKE,
        ("lane", "pending"),
        Fenced.NOTHING,
        "free slots > 0; lanes by rank, a lane whose oldest job has aged ranks higher",
        "XREADGROUP '>'; returns entry, job:<id> and server TIME; an entry of an answered job is acknowledged, deleted",
    ),
    _row(
        Event.RECLAIM,
        ("pending", "pending"),
        Fenced.NOTHING,
        "idle time > lease",
        "XCLAIM to the caller; a ghost is acknowledged; a begun job is marked to run alone, and if it did, "
        "one death alone is counted",
    ),
    _row(
        Event.BEGIN,
        ("pending", "pending"),
        Fenced.OWNER,
        "done:<id> absent; cancel:<id> absent; attempts and deaths alone under their limits",
        "HINCRBY job:<id> attempt 1, once per consumer; HSET begun",
    ),
    _row(
        Event.RENEW,
        ("pending", "pending"),
        Fenced.OWNER,
        "",
        "XCLAIM JUSTID to itself (FORCE if it was acknowledged from outside); returns what is lost, what is cancelled",
    ),
    _row(
        Event.DELTA,
        ("pending", "pending"),
        Fenced.OWNER,
        "done:<id> absent",
        "XADD reply:<id> delta; PEXPIRE reply",
    ),
    _row(
        Event.FINISH,
        ("lane pending held delayed", "done"),
        Fenced.DONE_ABSENT,
        "",
        "XADD reply done; PEXPIRE reply; SET done; remove the job from wherever it is; DEL job:<id>, cancel:<id>; "
        "convert dedup; promote the tenant's next held job; who loses the race still acknowledges and deletes",
    ),
    _row(
        Event.RELEASE,
        ("pending", "pending"),
        Fenced.OWNER,
        "",
        "XCLAIM to the parking consumer with a large IDLE and JUSTID: anyone may reclaim it now; attempt unchanged "
        "(lowered by one where a drain interrupts a begun job)",
    ),
    _row(
        Event.RETRY,
        ("pending", "delayed"),
        Fenced.OWNER,
        "done:<id> absent; an infrastructure fault, or an envelope of a newer version",
        "ZADD delayed (member: id, lane, attempt, original time, then the envelope); XACK; XDEL",
    ),
    _row(
        Event.DEAD_LETTER,
        ("pending", "done"),
        Fenced.DONE_ABSENT,
        "attempts used up, poison or undecodable",
        "FINISH with a failed reply; XADD dead (reason, payload, attempts, last consumer)",
    ),
    _row(
        Event.CANCEL,
        ("lane held delayed pending", "done pending"),
        Fenced.DONE_ABSENT,
        "",
        "not held by a worker: FINISH with a cancelled reply, here; else SET cancel:<id> and PUBLISH events",
    ),
    _row(
        Event.EXPIRE,
        ("lane held delayed pending", "done"),
        Fenced.DONE_ABSENT,
        "deadline < server TIME; not running",
        "FINISH with an expired reply, at take or by the sweep",
    ),
    _row(
        Event.PROMOTE_DELAYED,
        ("delayed", "lane"),
        Fenced.DONE_ABSENT,
        "score <= server TIME",
        "ZREM; XADD lane; HSET job:<id> entry id",
    ),
    _row(
        Event.PROMOTE_HELD,
        ("held", "lane"),
        Fenced.NOTHING,
        "the tenant has fewer than W entries in the lane",
        "LPOP held; XADD lane; HSET job:<id> entry id",
    ),
    _row(
        Event.REAP_CONSUMER,
        ("", ""),
        Fenced.NOTHING,
        "worker:<name> absent and pending count 0",
        "XGROUP DELCONSUMER",
    ),
    _row(
        Event.CHECK,
        ("lane held delayed pending", "lane pending done"),
        Fenced.DONE_ABSENT,
        "due in `checks`; deleted, acknowledged or passed over from outside (XDEL, XTRIM, XACK, XGROUP, DEL); no live "
        "worker has it in hand",
        "where its envelope is left: XCLAIM FORCE to the parking consumer, or XADD lane; else DEAD_LETTER",
    ),
)

BY_EVENT: Final = {row.event: row for row in TRANSITIONS}
