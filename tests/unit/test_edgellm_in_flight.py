"""Bundles without a draft run through the vendor's `RequestEngine`: rows join while others run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edgellm_worker.engine.api import Engine, FinishReason
from edgellm_worker.engine.edgellm.in_flight import InFlightEngine
from edgellm_worker.engine.edgellm.open import EdgeLlmOptions, open_bundle
from edgellm_worker.engine.edgellm.static import StaticEngine
from edgellm_worker.engine.errors import CapacityError, EngineError
from tests.support import fake_edgellm as fake
from tests.support.edgellm_setup import EOS, MODEL_DIR, Collected, count_tokens, job, open_fake, run_all, write_bundle
from tests.support.fake_edgellm import Behaviour, Script


def script_of(text: str) -> Script:
    word, _, number = text.partition(" ")
    match word:
        case "stop":
            return Script([[10], *([[11]] * int(number)), [EOS]])
        case "bad":
            return Script([[1]], error="EDGELLM_INPUT_TOO_LONG: input length 9 exceeds engine max_input_len 8")
        case "miscounted":
            return Script([[1]], num_prompt=77)
        case _:
            return Script([[10], [11]])


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour(script_of, count_tokens)


@pytest.fixture
def engine(tmp_path: Path, behaviour: Behaviour) -> Engine:
    engine = open_fake(write_bundle(tmp_path, num_drafts=0), behaviour)
    assert isinstance(engine, InFlightEngine)
    return engine


def test_a_row_joins_while_another_runs(engine: Engine, behaviour: Behaviour) -> None:
    hold = threading.Event()
    behaviour.before_round = lambda number: hold.wait() if number == 3 else None
    engine.add(1, job("long", 6))
    got = Collected()
    while not got.updates:
        got.take(engine.step())
    engine.add(2, job("stop 1"))
    while not got.updates.get(2) or got.finish(2) is None:
        got.take(engine.step())
        hold.set()
    while engine.num_rows:
        got.take(engine.step())
    assert got.tokens(1) == [10, 11, 11, 11, 11, 11]
    assert got.tokens(2) == [10, 11, EOS]
    assert got.finish(1) is FinishReason.LENGTH


def test_each_row_is_one_request_with_a_channel_and_a_length_class(engine: Engine, behaviour: Behaviour) -> None:
    run_all(engine, {1: job("long", 5), 2: job("stop 2", 7)})
    assert [call["max_generate_length"] for call in behaviour.calls] == [8, 8]
    assert [call["num_channels"] for call in behaviour.calls] == [1, 1]
    assert engine.compat_key(job("long", 5)) == engine.compat_key(job("a much longer prompt than that one", 7))
    assert engine.compat_key(job("long", 5)) != engine.compat_key(job("long", 9))


def test_the_traits_say_in_flight_and_undrafted(engine: Engine) -> None:
    assert engine.traits.in_flight
    assert engine.traits.speculative_method.startswith("off: ")
    got = run_all(engine, {1: job("stop 1", temperature=0.0)})
    assert all(update.num_drafted == 0 and update.drafting_off is None for update in got.updates[1])


def test_a_row_that_the_runtime_fails_fails_alone(engine: Engine) -> None:
    got = run_all(engine, {1: job("stop 2"), 2: job("bad"), 3: job("miscounted")})
    assert got.finish(1) is FinishReason.STOP
    assert "Request 1 failed: EDGELLM_INPUT_TOO_LONG" in (got.error(2) or "")
    assert "reads this prompt as 77 tokens" in (got.error(3) or "")


def test_a_refused_submit_fails_the_row(engine: Engine, behaviour: Behaviour) -> None:
    (native,) = behaviour.runtimes

    def refuse(request: object) -> None:
        raise fake.SubmitError("queue full")

    native.submit = refuse
    got = run_all(engine, {1: job("stop 2")})
    assert got.error(1) == "the runtime refuses this request: queue full"


def test_a_removed_row_is_cancelled_and_its_slot_is_free(engine: Engine, behaviour: Behaviour) -> None:
    for row_id in range(4):
        engine.add(row_id, job("long", 100))
    with pytest.raises(CapacityError):
        engine.add(4, job("stop 2"))
    engine.remove(2)
    engine.add(4, job("stop 2"))
    got = run_all(engine)
    assert 2 not in got.updates
    assert [handle.was_cancelled for handle in behaviour.runtimes[0].handles] == [False, False, True, False, False]
    assert got.finish(4) is FinishReason.STOP


def test_a_stopped_request_engine_is_an_engine_error(engine: Engine) -> None:
    engine.close()
    with pytest.raises(EngineError, match="has stopped"):
        engine.step()


def test_without_a_request_engine_plain_bundles_run_in_closed_batches(tmp_path: Path, behaviour: Behaviour) -> None:
    module = fake.make_module(behaviour)
    del module.RequestEngine
    engine = open_bundle(EdgeLlmOptions(write_bundle(tmp_path, num_drafts=0), MODEL_DIR), module)
    assert isinstance(engine, StaticEngine)
    assert len(behaviour.runtimes[0].args) == 5
    got = run_all(engine, {1: job("stop 1"), 2: job("long", 4)})
    assert got.tokens(1) == [10, 11, EOS]
    assert got.tokens(2) == [10, 11, 11, 11]
    assert len(behaviour.calls) == 1


def test_a_runtime_that_seats_drafted_rows_in_flight_is_used_so(tmp_path: Path, behaviour: Behaviour) -> None:
    """The seam for a later release, found by its constructor and not by its version."""
    module = fake.make_module(behaviour)

    class LaterRequestEngine(module.RequestEngine):
        def __init__(
            self, engine_dir: str, *, draft_top_k: int, draft_step: int, verify_tree_size: int, **rest: object
        ):
            super().__init__(engine_dir, **rest)
            self.draft = (draft_top_k, draft_step, verify_tree_size)

    module.RequestEngine = LaterRequestEngine
    engine = open_bundle(EdgeLlmOptions(write_bundle(tmp_path), MODEL_DIR), module)
    assert isinstance(engine, InFlightEngine)
    assert engine.traits.in_flight
    assert engine.traits.speculative_method == "mtp"
    assert behaviour.runtimes[0].draft == (1, 3, 4)
    behaviour.script_of = lambda text: Script([[10], [11, 12], [13, EOS]])
    got = run_all(engine, {1: job("x"), 2: job("y", temperature=0.7)})
    assert got.accepted(1) == [1, 1]
    assert got.accepted(2) == []
    assert "temperature 0" in (got.updates[2][0].drafting_off or "")
