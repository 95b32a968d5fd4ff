"""Draft lengths: fixed, by schedule, measured; and the settings that choose among them."""

from typing import Any

import pytest

from edgellm_worker.engine.runtime.draft_length import (
    AdaptiveDraftLength,
    FixedDraftLength,
    ScheduledDraftLength,
    StepObservation,
)
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig


def observation(num_rows: int, length: int, num_accepted: int, step_s: float) -> StepObservation:
    accepted = min(length, num_accepted)
    return StepObservation(num_rows, length, (length,) * num_rows, (accepted,) * num_rows, step_s)


def drive(
    controller: AdaptiveDraftLength, num_steps: int, num_accepted: int, growth: float, num_rows: int = 2
) -> list[int]:
    """Steps of 1 + growth * k seconds in which every row accepts up to `num_accepted` drafts."""
    lengths = []
    for _ in range(num_steps):
        k = controller.choose(num_rows)
        controller.observe(observation(num_rows, k, num_accepted, 1.0 + growth * k))
        lengths.append(k)
    return lengths


def test_fixed_never_changes() -> None:
    fixed = FixedDraftLength(3)
    fixed.observe(observation(1, 3, 0, 9.0))
    assert [fixed.choose(n) for n in (1, 8)] == [3, 3]


def test_schedule_fills_gaps_and_the_tail_from_the_range_before_and_clamps() -> None:
    """As vLLM reads it: (1, 16, 3), (32, 128, 2), (256, 2048, 0)."""
    schedule = ScheduledDraftLength([(1, 16, 9), (256, 2048, 0), (32, 128, 2)], 3)
    expected = {1: 3, 16: 3, 17: 3, 31: 3, 32: 2, 128: 2, 129: 2, 255: 2, 256: 0, 5000: 0}
    assert {n: schedule.choose(n) for n in expected} == expected


def test_adaptive_stays_long_where_drafts_are_good_and_cheap() -> None:
    assert drive(AdaptiveDraftLength(5), 200, 5, 0.02)[-1] == 5


def test_adaptive_goes_to_zero_and_comes_back() -> None:
    controller = AdaptiveDraftLength(5)
    drive(controller, 200, 5, 0.05)
    bad = drive(controller, 800, 0, 0.3)
    assert bad[-100:].count(0) > 90
    good = drive(controller, 2500, 5, 0.05)
    assert good[-100:].count(5) > 90


def test_adaptive_finds_the_length_where_acceptance_ends() -> None:
    lengths = drive(AdaptiveDraftLength(5), 800, 2, 0.15)
    assert lengths[-200:].count(2) > 180


def test_adaptive_learns_step_times_for_each_number_of_rows_apart() -> None:
    controller = AdaptiveDraftLength(4)
    for _ in range(600):
        for num_rows, growth in ((1, 0.02), (8, 1.5)):
            k = controller.choose(num_rows)
            controller.observe(observation(num_rows, k, 1, 1.0 + growth * k))
    assert controller.choose(1) in {1, 2}
    assert controller.choose(8) == 0


def test_adaptive_surveys_two_lengths_of_the_first_load_and_knows_a_poor_start_within_ten_steps() -> None:
    lengths = drive(AdaptiveDraftLength(5), 10, 0, 0.3)
    assert lengths[:5] == [5, 5, 3, 5, 1]
    assert lengths[-1] == 0


def test_another_number_of_rows_starts_from_the_step_times_of_the_nearest() -> None:
    """Half as fast at every length, and drafts that become good: the best length is known without trying any other."""
    controller = AdaptiveDraftLength(4)
    drive(controller, 400, 1, 0.4, num_rows=2)
    assert controller.choose(4) == controller.choose(2)
    for _ in range(8):
        k = controller.choose(4)
        controller.observe(observation(4, k, 4, 2.0 * (1.0 + 0.4 * k)))
    load = controller._loads[4]
    assert [load.times.seconds(k) for k in range(5)] == pytest.approx([2.0 * (1.0 + 0.4 * k) for k in range(5)])


def test_choosing_changes_nothing() -> None:
    controller = AdaptiveDraftLength(5)
    drive(controller, 37, 2, 0.15)
    assert len({controller.choose(2) for _ in range(50)}) == 1


def test_one_slow_step_does_not_move_it() -> None:
    controller = AdaptiveDraftLength(5)
    drive(controller, 500, 5, 0.05)
    before = controller.choose(2)
    controller.observe(observation(2, before, 5, 500.0))
    assert controller.choose(2) == before


def test_the_same_observations_give_the_same_choices() -> None:
    assert drive(AdaptiveDraftLength(5), 300, 3, 0.2) == drive(AdaptiveDraftLength(5), 300, 3, 0.2)


# Settings


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"method": "mtp", "num_speculative_tokens": 3}, FixedDraftLength),
        ({"num_speculative_tokens": 0}, FixedDraftLength),
        (
            {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]]},
            ScheduledDraftLength,
        ),
        ({"num_speculative_tokens": 3, "adaptive": True}, AdaptiveDraftLength),
    ],
)
def test_settings_choose_the_controller(given: dict[str, Any], kind: type) -> None:
    assert type(SpeculativeConfig.read(given).draft_length()) is kind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "num_speculative_tokens is None"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"num_speculative_tokens": 16}, "num_speculative_tokens is 16"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 3, "method": "eagle3"}, "method is 'eagle3'"),
        ({"num_speculative_tokens": 3, "adaptive": "yes"}, "adaptive is 'yes'"),
        ({"num_speculative_tokens": 3, "num_speculative_token": 3}, "unknown key 'num_speculative_token'"),
        ({"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": {}}, "not a list"),
        ({"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": []}, "not a list"),
        ({"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2]]}, "not three integers"),
        ({"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[2, 4, 3]]}, "starts at 2"),
        ({"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, -1]]}, "drafts >= 0"),
        ({"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 1]]}, "both hold 4"),
        (
            {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]], "adaptive": True},
            "exclude each other",
        ),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig.read(given)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        SpeculativeConfig.read({"depth": 3, "method": "medusa", "adaptive": 1})
    for words in ("unknown key 'depth'", "method is 'medusa'", "num_speculative_tokens is None", "adaptive is 1"):
        assert words in str(caught.value)
