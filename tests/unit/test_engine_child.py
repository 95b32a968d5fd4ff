"""Frames and watchdog of the engine process, without a process."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm_worker.engine.api import (
    EngineLimits,
    EngineTraits,
    FinishReason,
    GenerationRequest,
    Phase,
    RowUpdate,
    SamplingParams,
    StepReport,
    TokenLogprobs,
)
from edgellm_worker.engine.child.messages import (
    HEADER,
    MAX_BODY_BYTES,
    Add,
    Close,
    Failed,
    FrameError,
    Hello,
    Load,
    Remove,
    Report,
    body_length,
    decode,
    encode,
)
from edgellm_worker.engine.child.watchdog import Watchdog, WatchdogLimits
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

MESSAGES = [
    Load("reference", "/models/x", EngineOptions(8, speculative=SpeculativeConfig(5, schedule=((1, 2, 5), (3, 8, 2))))),
    Add(7, GenerationRequest((1, 2), 5, SamplingParams(0.7, seed=2**62, logit_bias={3: -1.5}), frozenset({4, 9}))),
    Remove(7),
    Close(),
    Hello(EngineLimits(4, 64, 128, 4, 3, 3, 1000), EngineTraits("x", True, True, False, "mtp"), {"weights": 2**40}),
    Report(
        StepReport(
            (
                RowUpdate(1, (2, 3), (TokenLogprobs(-math.inf, ((1, -2.0),)),), FinishReason.STOP, 3, 1),
                RowUpdate(2, error="bad row", finish_reason=FinishReason.ERROR, is_verify=False),
            ),
            2,
            {Phase.DRAFT: 0.25, Phase.VERIFY: 1.5},
            3,
            64,
            90,
        )
    ),
    Failed("CheckpointError", ("a", "b")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_pipe(message):
    frame = encode(message)
    assert body_length(frame[: HEADER.size]) == len(frame) - HEADER.size
    assert decode(frame[HEADER.size :]) == message


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_a_header_of_random_bytes_is_refused_or_bounded(header):
    try:
        assert body_length(header) <= MAX_BODY_BYTES
        assert header.startswith(b"EDG1")
    except FrameError:
        pass


@given(st.binary(max_size=200))
def test_a_body_of_random_bytes_is_refused(body):
    with pytest.raises(FrameError):
        decode(body)


@given(st.data())
def test_a_mutated_body_is_refused_or_decodes_to_a_message(data):
    body = bytearray(encode(data.draw(st.sampled_from(MESSAGES)))[HEADER.size :])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        encode(decode(bytes(body)))


LIMITS = WatchdogLimits(load_s=1, progress_s=30, prefill_s_per_1000_tokens=10)


def test_the_watchdog_is_armed_only_while_rows_run():
    dog = Watchdog(LIMITS)
    assert dog.deadline is None
    dog.row_added(100.0, 0)
    assert dog.deadline == 130.0
    dog.step_done(110.0, num_rows=0, num_prefill_tokens=0, num_tokens=1)
    assert dog.deadline is None


def test_the_allowance_grows_with_prompt_tokens_and_shrinks_as_they_are_read():
    dog = Watchdog(LIMITS)
    dog.row_added(0.0, 4000)
    assert dog.deadline == 70.0
    dog.step_done(5.0, num_rows=1, num_prefill_tokens=3000, num_tokens=0)
    assert dog.deadline == 45.0


def test_reports_without_progress_do_not_feed_the_watchdog():
    dog = Watchdog(LIMITS)
    dog.row_added(0.0, 0)
    dog.step_done(29.0, num_rows=1, num_prefill_tokens=0, num_tokens=0)
    assert dog.deadline == 30.0
    dog.step_done(29.5, num_rows=1, num_prefill_tokens=0, num_tokens=2)
    assert dog.deadline == 59.5


def test_a_row_joining_a_stuck_engine_does_not_extend_its_time():
    dog = Watchdog(LIMITS)
    dog.row_added(0.0, 0)
    dog.row_added(29.0, 0)
    assert dog.deadline == 30.0
