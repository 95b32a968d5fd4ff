"""Closed batches over the vendor's `handle_request`: one call per batch, one right answer per job."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest

from edgellm_worker.engine.api import Engine, FinishReason, GenerationRequest, Phase, SamplingParams
from edgellm_worker.engine.edgellm.static import StaticEngine
from edgellm_worker.engine.errors import CapacityError, EngineError, RequestError
from tests.support.edgellm_setup import EOS, Collected, count_tokens, job, open_fake, run_all, tokens_of, write_bundle
from tests.support.fake_edgellm import Behaviour, Script
from tests.support.fake_edgellm import FinishReason as Native


def script_of(text: str) -> Script:
    """Prompts say what their row does: "stop N" ends after N tokens, "long" never does, "bad" fails the call."""
    word, _, number = text.partition(" ")
    match word:
        case "stop":
            return Script([[10], *([[11, 12]] * (int(number) // 2)), [EOS]])
        case "bad":
            return Script([[1]], error="EDGELLM_INPUT_TOO_LONG: input length 9 exceeds engine max_kv_cache_capacity 8")
        case "broken":
            return Script([[1]], error="CUDA error: an illegal memory access was encountered")
        case "miscounted":
            return Script([[1]], num_prompt=77)
        case _:
            return Script([[10], [11, 12, 13, 14], [15], [16, 17]])


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour(script_of, count_tokens)


@pytest.fixture
def engine(tmp_path: Path, behaviour: Behaviour) -> Engine:
    return open_fake(write_bundle(tmp_path), behaviour)


def test_one_native_call_per_batch_with_every_row_in_it(engine: Engine, behaviour: Behaviour) -> None:
    got = run_all(engine, {1: job("long one", 5), 2: job("stop 4"), 3: job("long two", 9), 4: job("stop 2")})
    assert len(behaviour.calls) == 1
    assert behaviour.calls[0]["texts"] == ["long one", "stop 4", "long two", "stop 2"]
    assert behaviour.calls[0]["max_generate_length"] == 16
    assert got.tokens(1) == [10, 11, 12, 13, 14]
    assert got.tokens(2) == [10, 11, 12, 11, 12, EOS]
    assert got.tokens(3) == [10, 11, 12, 13, 14, 15, 16, 17, 16]
    assert [got.finish(row) for row in (1, 2, 3, 4)] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]


def test_the_constructor_gets_the_draft_settings_by_position(engine: Engine, behaviour: Behaviour) -> None:
    (runtime,) = behaviour.runtimes
    assert runtime.args[3:6] == (1, 3, 4)
    assert len(runtime.args) == 10
    assert behaviour.profiling == [True]
    assert engine.limits.max_new_tokens(100) == 512 - 100 - 4  # the runtime's clamp: capacity - prompt - verify size
    assert engine.traits.speculative_method == "mtp"
    assert not engine.traits.in_flight


def test_acceptance_is_read_from_chunk_sizes(engine: Engine) -> None:
    got = run_all(engine, {1: job("long", 8)})
    assert got.accepted(1) == [3, 0, 1]
    first = got.updates[1][0]
    assert (first.is_verify, first.num_drafted, first.token_ids) == (False, 0, (10,))
    assert all(update.drafting_off is None for update in got.updates[1])


def test_a_chunk_of_several_rounds_is_told_as_several(engine: Engine, behaviour: Behaviour) -> None:
    behaviour.script_of = lambda text: Script([[10], [11, 12, 13], [14, 15], [EOS]], held=frozenset({0, 1}))
    got = run_all(engine, {1: job("x")})
    assert got.tokens(1) == [10, 11, 12, 13, 14, 15, EOS]
    assert got.accepted(1) == [3, 0, 0]  # 5 tokens took at least two rounds, then the EOS


def test_the_row_at_its_own_limit_is_cut_cancelled_and_told_length(engine: Engine, behaviour: Behaviour) -> None:
    turns = threading.Semaphore(0)
    behaviour.before_round = lambda number: turns.acquire() if number else None
    engine.add(1, job("long", 3))
    engine.add(2, job("long", 12))
    got = Collected()
    while engine.num_rows:
        turns.release()
        got.take(engine.step())
    while not behaviour.ends:
        engine.step()
    assert got.tokens(1) == [10, 11, 12]
    (reason, num_tokens), _ = behaviour.ends[0]
    assert reason is Native.CANCELLED
    assert num_tokens < 12  # soon after it was cut, not at the batch's limit
    assert got.finish(1) is FinishReason.LENGTH
    assert got.accepted(1) == [3]  # engine work, also for what the limit then cut
    assert got.finish(2) is FinishReason.LENGTH
    assert len(got.tokens(2)) == 12


def test_an_eos_of_the_request_that_the_runtime_does_not_know_ends_the_row(
    engine: Engine, behaviour: Behaviour
) -> None:
    request = GenerationRequest(tokens_of("long"), 16, SamplingParams(), frozenset({EOS, 12}))
    got = run_all(engine, {1: request})
    assert got.tokens(1) == [10, 11, 12]
    assert got.finish(1) is FinishReason.STOP


def test_a_row_that_finishes_early_is_told_while_the_call_still_runs(engine: Engine, behaviour: Behaviour) -> None:
    hold = threading.Event()
    behaviour.before_round = lambda number: hold.wait() if number == 3 else None
    engine.add(1, job("stop 2"))
    engine.add(2, job("long", 12))
    got = Collected()
    while not got.updates.get(1) or got.finish(1) is None:
        got.take(engine.step())
    assert got.tokens(1) == [10, 11, 12, EOS]
    assert engine.num_rows == 1
    hold.set()
    rest = run_all(engine)
    assert got.tokens(2) + rest.tokens(2) == [10, 11, 12, 13, 14, 15, 16, 17, 16, 17, 16, 17]


def test_rows_are_told_apart_whatever_the_order_of_their_ends(engine: Engine) -> None:
    got = run_all(engine, {1: job("stop 8"), 2: job("stop 6"), 3: job("stop 4"), 4: job("stop 2")})
    assert [len(got.tokens(row)) for row in (1, 2, 3, 4)] == [10, 8, 6, 4]


def test_sampled_jobs_run_undrafted_and_say_so(engine: Engine, behaviour: Behaviour) -> None:
    sampled = job("long", 4, temperature=1.0, seed=7)
    assert engine.compat_key(sampled) != engine.compat_key(job("long", 4))
    got = run_all(engine, {1: sampled})
    (call,) = behaviour.calls
    assert call["disable_spec_decode"] is True
    assert call["seeds"] == [7]
    assert call["top_k"] == 0
    assert call["top_p"] < 1 - 1e-6  # else the runtime's sampler would take temperature 1 for greedy
    assert {update.drafting_off for update in got.updates[1]} == {"this engine drafts at temperature 0 only"}
    assert got.accepted(1) == []
    assert all(report.num_speculative_tokens == 0 for report in got.reports if report.updates)


def test_mixed_jobs_make_one_call_per_kind(engine: Engine, behaviour: Behaviour) -> None:
    """Eight jobs of three kinds through four slots."""
    jobs = [
        job("stop 2"),
        job("stop 4", temperature=0.5, seed=1),
        job("stop 2", top_logprobs=2),
        job("stop 6"),
        job("stop 4", temperature=0.5, seed=2),
        job("stop 2", temperature=0.9, seed=3),
        job("stop 4"),
        job("stop 8", logit_bias={5: -100.0}),
    ]
    groups: dict[object, dict[int, GenerationRequest]] = {}
    for row_id, request in enumerate(jobs):
        groups.setdefault(engine.compat_key(request), {})[row_id] = request
    answers = {}
    for members in groups.values():
        got = run_all(engine, members)
        answers |= {row_id: got.finish(row_id) for row_id in members}
    assert answers == dict.fromkeys(range(8), FinishReason.STOP)
    assert len(behaviour.calls) == 4
    assert sorted(len(call["texts"]) for call in behaviour.calls) == [1, 1, 2, 4]
    by_temperature = {(call["temperature"], call["num_logprobs"]): call for call in behaviour.calls}
    assert by_temperature[0.5, 0]["seeds"] == [1, 2]
    assert by_temperature[0.0, 0]["seeds"] == [None] * 4
    assert by_temperature[0.0, 0]["biases"][-1] == {5: -100.0}
    assert by_temperature[0.0, 2]["num_logprobs"] == 2


def test_rows_of_another_key_wait_for_the_next_call(engine: Engine, behaviour: Behaviour) -> None:
    got = run_all(engine, {1: job("stop 2"), 2: job("stop 4", temperature=0.5), 3: job("stop 6")})
    assert [call["texts"] for call in behaviour.calls] == [["stop 2", "stop 6"], ["stop 4"]]
    assert [got.finish(row) for row in (1, 2, 3)] == [FinishReason.STOP] * 3


def test_rows_added_one_by_one_between_steps_share_the_first_call(engine: Engine, behaviour: Behaviour) -> None:
    engine.add(1, job("stop 2"))
    assert engine.step().updates == ()
    engine.add(2, job("stop 4"))
    run_all(engine)
    assert [call["texts"] for call in behaviour.calls] == [["stop 2", "stop 4"]]


def test_a_call_that_still_runs_for_nobody_is_waited_for_and_does_not_split_the_next(
    engine: Engine, behaviour: Behaviour
) -> None:
    hold = threading.Event()
    behaviour.before_round = lambda number: hold.wait() if number == 1 else None
    run_all(engine, {1: job("long", 1)})
    engine.add(2, job("stop 2"))
    assert engine.step().updates == ()
    hold.set()
    engine.add(3, job("stop 4"))
    got = run_all(engine)
    assert [call["texts"] for call in behaviour.calls] == [["long"], ["stop 2", "stop 4"]]
    assert (got.finish(2), got.finish(3)) == (FinishReason.STOP, FinishReason.STOP)


def test_a_call_that_one_row_fails_is_run_again_row_by_row(engine: Engine, behaviour: Behaviour) -> None:
    got = run_all(engine, {1: job("stop 2"), 2: job("bad"), 3: job("stop 4")})
    assert [call["texts"] for call in behaviour.calls] == [["stop 2", "bad", "stop 4"], ["stop 2"], ["bad"], ["stop 4"]]
    assert got.finish(1) is FinishReason.STOP
    assert got.finish(3) is FinishReason.STOP
    assert got.finish(2) is FinishReason.ERROR
    assert "EDGELLM_INPUT_TOO_LONG" in (got.error(2) or "")


def test_any_other_exception_means_a_broken_engine(engine: Engine) -> None:
    engine.add(1, job("stop 2"))
    engine.add(2, job("broken"))
    with pytest.raises(EngineError, match="illegal memory access"):
        run_all(engine)


def test_a_prompt_that_the_runtime_counts_otherwise_fails_alone(engine: Engine, behaviour: Behaviour) -> None:
    got = run_all(engine, {1: job("miscounted"), 2: job("stop 2")})
    assert "reads this prompt as 77 tokens" in (got.error(1) or "")
    assert got.finish(2) is FinishReason.STOP
    assert [call["texts"] for call in behaviour.calls] == [["stop 2"]]


def test_rows_whose_channel_stays_silent_are_read_from_the_response(engine: Engine, behaviour: Behaviour) -> None:
    behaviour.silent_channels = True
    got = run_all(engine, {1: job("stop 2"), 2: job("long", 4)})
    assert got.tokens(1) == [10, 11, 12, EOS]
    assert got.tokens(2) == [10, 11, 12, 13]


def test_a_response_in_another_order_does_not_touch_streamed_rows(engine: Engine, behaviour: Behaviour) -> None:
    behaviour.scramble_response = True
    got = run_all(engine, {1: job("stop 2"), 2: job("stop 6")})
    assert got.tokens(1) == [10, 11, 12, EOS]
    assert got.tokens(2) == [10, 11, 12, 11, 12, 11, 12, EOS]


def test_a_response_with_rows_missing_breaks_the_engine(engine: Engine, behaviour: Behaviour) -> None:
    behaviour.drop_response_rows = 1
    engine.add(1, job("stop 2"))
    engine.add(2, job("long", 40))
    with pytest.raises(EngineError, match="returned 1 rows for 2"):
        run_all(engine)


def test_a_removed_row_is_cancelled_and_never_told(engine: Engine, behaviour: Behaviour) -> None:
    hold = threading.Event()
    behaviour.before_round = lambda number: hold.wait() if number == 1 else None
    engine.add(1, job("long", 200))
    engine.add(2, job("stop 2"))
    while not engine.step().updates:
        pass
    engine.remove(1)
    engine.remove(1)
    engine.remove(99)
    hold.set()
    got = run_all(engine)
    assert list(got.updates) == [2]
    assert len(behaviour.calls) == 1


def test_a_row_removed_before_its_call_takes_no_part(engine: Engine, behaviour: Behaviour) -> None:
    engine.add(1, job("long"))
    engine.add(2, job("stop 2"))
    engine.remove(1)
    run_all(engine)
    assert behaviour.calls[0]["texts"] == ["stop 2"]


def test_a_hung_call_makes_no_progress_and_does_not_block_step(engine: Engine, behaviour: Behaviour) -> None:
    behaviour.gate.clear()
    engine.add(1, job("long"))
    reports = [engine.step() for _ in range(4)]
    assert all(not report.updates and not report.num_prefill_tokens for report in reports)
    assert reports[-1].num_rows == 1
    behaviour.gate.set()
    engine.close()


def test_more_rows_than_slots_are_refused(engine: Engine) -> None:
    for row_id in range(4):
        engine.add(row_id, job("stop 2"))
    with pytest.raises(CapacityError):
        engine.add(4, job("stop 2"))


def test_ids_that_no_text_gives_are_refused(engine: Engine) -> None:
    halves = tokens_of("a") + tokens_of("b")
    assert tokens_of("ab") != halves
    with pytest.raises(RequestError, match="no text gives these ids") as caught:
        engine.add(1, GenerationRequest(halves, 4, eos_token_ids=frozenset({EOS})))
    assert caught.value.field == "prompt_token_ids"


def test_reports_say_where_time_and_memory_go(engine: Engine) -> None:
    got = run_all(engine, {1: job("stop 2"), 2: job("stop 4")})
    told = [report for report in got.reports if report.updates]
    num_prompt = count_tokens("stop 2") + count_tokens("stop 4")
    assert sum(report.num_prefill_tokens for report in told) == num_prompt
    assert set(told[0].phase_s) == {Phase.PREFILL}
    assert set(told[-1].phase_s) == {Phase.VERIFY}
    assert told[0].num_speculative_tokens == 3


def test_the_runtimes_own_counters_are_read_per_call(engine: Engine) -> None:
    assert isinstance(engine, StaticEngine)
    run_all(engine, {1: job("long", 8)})
    run_all(engine, {2: job("long", 8)})
    assert engine.last_call is not None
    counters = engine.last_call.counters
    assert engine.last_call.num_accepted_told == counters.num_accepted
    assert (counters.num_rounds, counters.num_generated, counters.num_accepted, counters.num_proposed) == (3, 7, 4, 9)


def test_nothing_of_a_call_outlives_it(engine: Engine, behaviour: Behaviour) -> None:
    held: list[weakref.ref[object]] = []
    record, behaviour.calls = behaviour.calls, []
    del record
    runtime = behaviour.runtimes[0]
    original = runtime.handle_request

    def watched(request: object) -> object:
        held.append(weakref.ref(request))
        return original(request)

    runtime.handle_request = watched
    run_all(engine, {1: job("stop 2")})
    engine.step()
    gc.collect()
    assert [reference() for reference in held] == [None]


def test_logprobs_come_with_their_tokens(engine: Engine) -> None:
    got = run_all(engine, {1: job("stop 2", top_logprobs=1)})
    logprobs = [entry for update in got.updates[1] for entry in update.logprobs]
    assert len(logprobs) == len(got.tokens(1))
    assert all(
        entry.logprob == -0.5 and entry.top == ((token, -0.5),)
        for entry, token in zip(logprobs, got.tokens(1), strict=True)
    )


def test_the_native_reasons_are_all_known() -> None:
    from edgellm_worker.engine.edgellm.rows import _FINISH_REASONS

    assert set(_FINISH_REASONS) <= {reason.name for reason in Native}
