"""Do the tests of the queue bite? Each mutant changes one line of the product; the test named beside it must fail.

    python bench/queue_mutants.py [words of a mutant's name]

Works on a copy in a temporary directory. docs/reliability.md holds the list.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKER = "worker/edgellm_worker/queue/"
WORKER_LUA = WORKER + "lua/"
PRODUCER = "producer/edgellm_producer/"
PRODUCER_LUA = PRODUCER + "lua/"


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    path: str
    old: str
    new: str
    file: str
    test: str


MUTANTS = (
    Mutant(
        "answered jobs are delivered again",
        WORKER_LUA + "entries.lua",
        "  if flags[1] then\n    forget",
        "  if false then\n    forget",
        "test_queue.py",
        "test_an_answered_job_that_comes_back_is_dropped",
    ),
    Mutant(
        "ghosts are not acknowledged",
        WORKER_LUA + "take.lua",
        "    if not claimed then\n      redis.call('XACK', lane_key(lane), GROUP, entry)",
        "    if not claimed then\n",
        "test_queue.py",
        "test_a_ghost_is_acknowledged_and_stops_nothing",
    ),
    Mutant(
        "reclaim looks at the first hundred",
        WORKER_LUA + "take.lua",
        "'IDLE', lease_ms, '-', '+', remaining)",
        "'-', '+', 100)",
        "test_queue.py",
        "test_one_dead_lease_behind_5000_live_ones_is_found",
    ),
    Mutant(
        "consumers go whatever they hold",
        WORKER_LUA + "sweep.lua",
        "field(consumer, 'pending') == 0 and ",
        "",
        "test_queue.py",
        "test_dead_consumers_go_when_they_hold_nothing",
    ),
    Mutant(
        "the group starts at the end",
        WORKER_LUA + "entries.lua",
        "GROUP, '0')",
        "GROUP, '$')",
        "test_queue.py",
        "test_a_flushed_queue_works_on",
    ),
    Mutant(
        "no bound",
        PRODUCER_LUA + "submit.lua",
        "if length >= limit then",
        "if false then",
        "test_queue_bounds.py",
        "test_a_full_queue_says_so_with_length_and_limit",
    ),
    Mutant(
        "no window per tenant",
        PRODUCER_LUA + "common.lua",
        "local TENANT_WINDOW = 64",
        "local TENANT_WINDOW = 64000",
        "test_queue_bounds.py",
        "test_tenant_a_with_1000_jobs_does_not_keep_b_waiting",
    ),
    Mutant(
        "a failed job keeps its key",
        PRODUCER_LUA + "common.lua",
        "if status == 'ok' then",
        "if true then",
        "test_queue_bounds.py",
        "test_a_key_is_kept_after_success_and_freed_after_failure",
    ),
    Mutant(
        "a lost job keeps its key",
        PRODUCER_LUA + "submit.lua",
        "if redis.call('EXISTS', job_key(other), P .. 'done:' .. other) == 0 then return nil end",
        "",
        "test_queue_bounds.py",
        "test_a_key_whose_job_an_outage_took_blocks_nobody",
    ),
    Mutant(
        "a submit does not look for its id",
        PRODUCER_LUA + "submit.lua",
        "if redis.call('EXISTS', job_key(id), P .. 'done:' .. id) > 0 then return {'known', id} end",
        "",
        "test_queue_bounds.py",
        "test_a_submit_that_runs_twice_is_one_job",
    ),
    Mutant(
        "newer versions fail at once",
        WORKER + "redis_queue.py",
        "NEWER_VERSION_DELAYS = 2",
        "NEWER_VERSION_DELAYS = 0",
        "test_queue_bad_entries.py",
        "test_a_newer_version_is_delayed_twice_then_given_up",
    ),
    Mutant(
        "no recovery after a failed read",
        WORKER + "redis_queue.py",
        "recovers, self._must_recover = self._must_recover, True",
        "recovers, self._must_recover = False, False",
        "test_queue_faults.py",
        "test_a_read_whose_reply_is_lost_parks_nothing",
    ),
    Mutant(
        "a repeated finish loses",
        PRODUCER_LUA + "common.lua",
        "return done == value, false, entry",
        "return false, false, entry",
        "test_queue_faults.py",
        "test_a_finish_whose_reply_is_lost_answers_once",
    ),
    Mutant(
        "a repeated begin counts again",
        WORKER_LUA + "begin.lua",
        "if job[1] == consumer then return 'started' end",
        "",
        "test_queue_faults.py",
        "test_a_begin_and_a_release_whose_replies_are_lost_count_once",
    ),
    Mutant(
        "retry does not check the owner",
        WORKER_LUA + "retry.lua",
        "if owner(lane, entry) ~= consumer then return 0 end",
        "",
        "test_queue.py",
        "test_a_late_retry_of_what_another_holds_does_nothing",
    ),
    Mutant(
        "repeated deltas are shown",
        PRODUCER + "streaming.py",
        "if delta.offset_tokens < len(self._current.token_ids):",
        "if False:",
        "test_queue_faults.py",
        "test_a_delta_whose_reply_is_lost_is_shown_once",
    ),
    Mutant(
        "the lease keeper sleeps",
        WORKER + "lease.py",
        "while not self._stop.wait(pause_s):",
        "while not self._stop.wait(600):",
        "test_queue_faults.py",
        "test_a_blocked_event_loop_loses_no_lease",
    ),
    Mutant(
        "the blocked read has no timeout",
        WORKER + "link.py",
        "config.block_ms / 1000 + self.BLOCK_MARGIN_S",
        "600",
        "test_queue_faults.py",
        "test_the_blocked_read_notices_a_dead_connection_within_five_seconds",
    ),
    Mutant(
        "the fence without the reply",
        PRODUCER_LUA + "common.lua",
        "  add_to_reply(id, 'done', payload, ttl_ms)\n  redis.call('SET',",
        "  redis.call('XACK', lane_key('normal'), GROUP, '0-1')\n  redis.call('SET',",
        "test_queue_faults.py",
        "test_a_full_server_refuses_and_recovers",
    ),
    Mutant(
        "a stranger's reply key stands",
        PRODUCER_LUA + "common.lua",
        "if kind_there ~= 'stream' and kind_there ~= 'none' then",
        "if false then",
        "test_queue_faults.py",
        "test_a_reply_key_of_a_stranger_stops_no_batch",
    ),
    Mutant(
        "the deadline is the worker's clock",
        WORKER + "redis_queue.py",
        "row.deadline_ms <= now_ms",
        "row.deadline_ms <= time.time_ns() // 10**6",
        "test_queue_faults.py",
        "test_a_worker_clock_five_minutes_off_changes_nothing",
    ),
    Mutant(
        "deadlines are not swept",
        WORKER_LUA + "sweep.lua",
        "expired[#expired + 1] =",
        "local _ =",
        "test_queue.py",
        "test_an_expired_job_deep_in_the_queue_is_answered_by_the_sweep",
    ),
    Mutant(
        "cancel never answers",
        PRODUCER_LUA + "cancel.lua",
        "if holder and holder ~= PARKED then",
        "if true then",
        "test_queue.py",
        "test_cancel_of_what_waits_is_answered_by_the_cancel_itself",
    ),
    Mutant(
        "no cancel hint",
        PRODUCER_LUA + "cancel.lua",
        "redis.call('PUBLISH', P .. 'events', 'cancel ' .. id)",
        "",
        "test_queue.py",
        "test_cancel_of_what_runs_reaches_its_worker",
    ),
    Mutant(
        "renewal steals",
        WORKER_LUA + "renew.lua",
        "if mine[lane .. ' ' .. entry] then",
        "if true then",
        "test_queue.py",
        "test_renewal_is_one_command_and_finds_what_was_lost",
    ),
    Mutant(
        "release keeps the attempt counted",
        WORKER_LUA + "release.lua",
        "if ARGV[2] == '1' then",
        "if false then",
        "test_queue.py",
        "test_release_hands_back_at_once_in_place_and_keeps_the_attempts",
    ),
    Mutant(
        "expired replies are called unknown",
        PRODUCER + "job.py",
        "raise ResultExpired(",
        "raise UnknownJob(",
        "test_client.py",
        "test_not_ready_expired_and_unknown_are_three_answers",
    ),
    Mutant(
        "lanes of equal rank: the better one",
        WORKER_LUA + "take.lua",
        "best[turn % #best + 1]",
        "best[1]",
        "test_queue.py",
        "test_a_lane_whose_oldest_job_aged_takes_turns_with_the_better_one",
    ),
    Mutant(
        "every lease is over",
        WORKER + "redis_queue.py",
        "            self._config.lease_ms,\n            round(self._config.ageing_s",
        "            0,\n            round(self._config.ageing_s",
        "test_queue_faults.py",
        "test_five_leases_on_a_healthy_worker_beside_idle_ones_start_once",
    ),
)


def is_caught(mutant: Mutant, copy: Path) -> bool:
    path = copy / mutant.path
    original = path.read_text(encoding="utf-8")
    if mutant.old not in original:
        raise SystemExit(f"{mutant.name}: {mutant.path} has changed, mend this list")
    path.write_text(original.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    places = os.pathsep.join(str(copy / part) for part in ("producer", "worker", ""))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=30", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, f"tests/contract/{mutant.file}", "-k", mutant.test],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            check=False,
        )
    finally:
        path.write_text(original, encoding="utf-8")
    return done.returncode == 1


def main() -> int:
    wanted = " ".join(sys.argv[1:])
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("producer", "worker", "tests"):
            shutil.copytree(ROOT / part, copy / part)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant in MUTANTS:
            if wanted in mutant.name:
                caught = is_caught(mutant, copy)
                survivors += not caught
                print("caught  " if caught else "SURVIVED", mutant.name, "|", mutant.test, flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
