"""Every transition of a job in Redis, as one table.

A job is in exactly one place at a time:

    held ──promote──▶ lane ──take──▶ pending ──finish──▶ done
      ▲                ▲               │ │ │
      └────submit──────┘◀──release─────┘ │ └──dead-letter──▶ dead + done
                       ▲                 ▼
                       └──promote──── delayed

Each row below is one Lua script, or one branch of one: the server runs it whole or not at all, so between two rows a
process may die anywhere and the next owner finds a state of this drawing. The *fence* is `done:<id>`, written once with
NX: the first answer wins, whoever owns the entry. Ownership alone is never a fence, because a failover can lose the
pending list; an acknowledgement alone is never a fence, because XACK does not check who sends it.
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


class Fenced(StrEnum):
    """What a script checks before it acts."""

    NOTHING = "nothing"
    OWNER = "the caller's consumer name holds the entry in the pending list"
    DONE_ABSENT = "done:<id> does not exist (SET NX)"


@dataclass(frozen=True, slots=True)
class Transition:
    """`source` and `target` are places of the drawing; `check` is what the script verifies; `effect` what it writes."""

    event: Event
    source: str
    target: str
    check: Fenced
    precondition: str
    effect: str


TRANSITIONS: Final = (
    Transition(
        Event.SUBMIT,
        "absent",
        "lane or held",
        Fenced.NOTHING,
        "dedup:<key> absent or same body; lanes + held + delayed < config limit; tenant under its limits; "
        "job:<id> and done:<id> absent",
        "SET dedup NX PX; HSET job:<id>; XADD lane (or RPUSH held when the tenant has W entries in the lane)",
    ),
    Transition(
        Event.TAKE,
        "lane",
        "pending",
        Fenced.NOTHING,
        "free slots > 0; aged lanes first",
        "XREADGROUP '>' COUNT remaining per lane; returns entry, job hash and server TIME",
    ),
    Transition(
        Event.RECLAIM,
        "pending",
        "pending",
        Fenced.NOTHING,
        "idle time > lease; entry still exists",
        "XAUTOCLAIM to the caller over the whole list by cursor; ghosts are acknowledged; a begun job is marked solo",
    ),
    Transition(
        Event.BEGIN,
        "pending",
        "pending",
        Fenced.OWNER,
        "owner; done:<id> absent; cancel:<id> absent; attempts < limit",
        "HINCRBY job:<id> attempt 1; HSET begun 1",
    ),
    Transition(
        Event.RENEW,
        "pending",
        "pending",
        Fenced.OWNER,
        "owner",
        "XCLAIM JUSTID to itself; returns the ids that are lost and those that are cancelled",
    ),
    Transition(
        Event.DELTA,
        "pending",
        "pending",
        Fenced.OWNER,
        "owner; done:<id> absent",
        "XADD reply:<id> delta; PEXPIRE reply",
    ),
    Transition(
        Event.FINISH,
        "any",
        "done",
        Fenced.DONE_ABSENT,
        "done:<id> absent",
        "SET done NX PX; XADD reply done; PEXPIRE reply; XACK; XDEL; DEL job:<id>, cancel:<id>; convert dedup; "
        "promote one held entry; whoever loses the race still acknowledges and deletes",
    ),
    Transition(
        Event.RELEASE,
        "pending",
        "pending",
        Fenced.OWNER,
        "owner",
        "XCLAIM to the parking consumer with a large IDLE and JUSTID: any sweeper may take it now; attempt unchanged "
        "(lowered by one where a drain interrupts a begun job)",
    ),
    Transition(
        Event.RETRY,
        "pending",
        "delayed",
        Fenced.OWNER,
        "owner; infrastructure fault; attempts < limit",
        "ZADD delayed (member: the whole envelope with attempt, original time and lane); XACK; XDEL",
    ),
    Transition(
        Event.DEAD_LETTER,
        "pending",
        "dead + done",
        Fenced.DONE_ABSENT,
        "attempts used up, poison or undecodable",
        "XADD dead (reason, payload, attempts, last consumer); then FINISH with a failed reply",
    ),
    Transition(
        Event.CANCEL,
        "any",
        "done, or pending with a flag",
        Fenced.DONE_ABSENT,
        "job known",
        "queued, held or delayed: removed and answered cancelled here; pending: SET cancel:<id> and PUBLISH events",
    ),
    Transition(
        Event.EXPIRE,
        "lane, held or delayed",
        "done",
        Fenced.DONE_ABSENT,
        "deadline < server TIME",
        "FINISH with an expired reply, at take or by the sweep",
    ),
    Transition(
        Event.PROMOTE_DELAYED,
        "delayed",
        "lane",
        Fenced.NOTHING,
        "score <= server TIME",
        "ZREM; XADD lane; HSET job:<id> entry id",
    ),
    Transition(
        Event.PROMOTE_HELD,
        "held",
        "lane",
        Fenced.NOTHING,
        "the tenant has fewer than W entries in the lane",
        "LPOP held of the next tenant round robin; XADD lane; HSET job:<id> entry id",
    ),
    Transition(
        Event.REAP_CONSUMER,
        "consumer",
        "absent",
        Fenced.NOTHING,
        "worker:<name> absent and pending count 0",
        "XGROUP DELCONSUMER",
    ),
)
