"""The measured draft length against the best fixed one, over recorded acceptance.

tests/golden/draft_traces.json (bench/record_draft_traces.py) says how many of six drafts the tiny checkpoint's head gets
right at every position of 22 greedy and 22 sampled texts. Text does not depend on drafts, so a step with k drafts at position
t emits min(right[t], k) + 1 tokens: the simulation is exact for any choice of lengths. Step times come from tables: the
recorded one and four shapes of other machines. The controller sees them with jitter and rare slow steps; the score uses the
true times. It must reach 95% of the best fixed length, learning included, and it beats it where the text changes.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm_worker.engine.runtime.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    FixedDraftLength,
    StepObservation,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "draft_traces.json").read_text())
MAX_DRAFTS = 5
TOKENS_PER_ROW = 2500
BOUND = 0.95

StepTime = Callable[[int, int], float]
TIMES: dict[str, StepTime] = {
    "recorded": lambda rows, k: GOLDEN["step_ms"][str(rows)][k] / 1e3,
    "bandwidth bound": lambda rows, k: 0.010 * (1 + 0.04 * k),
    "compute bound": lambda rows, k: 0.010 * (1 + 0.35 * k),
    "by verified tokens": lambda rows, k: 0.004 + 0.0008 * rows * (k + 1),
    "a jump at four drafts": lambda rows, k: 0.010 * (1 + 0.05 * k + (0.5 if k > 3 else 0.0)),
}


def trace(kind: str, row: int) -> list[int]:
    """An endless supply of one kind of text: the recorded ones in a row, each row starting elsewhere."""
    texts = GOLDEN["accepted"][kind]
    return [int(digit) for text in (*texts[row:], *texts[:row]) for digit in text]


def changing(row: int) -> list[int]:
    """Easy text, then text that the head gets nothing right of, and so on."""
    easy = trace("greedy", row)
    return easy[:1000] + [0] * 1000


def simulate(
    controller: DraftLength,
    rows: list[list[int]],
    step_time: StepTime,
    seed: int = 1,
    tokens_per_row: int = TOKENS_PER_ROW,
) -> float:
    """Tokens per second."""
    rng, at = random.Random(seed), [0] * len(rows)
    num_tokens, took_s = 0, 0.0
    while num_tokens < tokens_per_row * len(rows):
        k = controller.choose(len(rows))
        accepted = tuple(min(row[at[r] % len(row)], k) for r, row in enumerate(rows))
        at = [position + a + 1 for position, a in zip(at, accepted, strict=True)]
        num_tokens += sum(accepted) + len(rows)
        true_s = step_time(len(rows), k)
        took_s += true_s
        seen_s = true_s * rng.uniform(0.95, 1.1) * (5.0 if rng.random() < 0.005 else 1.0)
        controller.observe(StepObservation(len(rows), k, (k,) * len(rows), accepted, seen_s))
    return num_tokens / took_s


def against_best(
    rows: list[list[int]], step_time: StepTime, seed: int = 1, tokens_per_row: int = TOKENS_PER_ROW
) -> float:
    controllers = [AdaptiveDraftLength(MAX_DRAFTS), *(FixedDraftLength(k) for k in range(MAX_DRAFTS + 1))]
    adaptive, *fixed = [simulate(c, rows, step_time, seed, tokens_per_row) for c in controllers]
    return adaptive / max(fixed)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("machine", TIMES)
def test_never_more_than_5_percent_below_the_best_fixed_length(machine: str, kind: str, num_rows: int) -> None:
    rows = [trace(kind, row) for row in range(num_rows)]
    assert against_best(rows, TIMES[machine]) >= BOUND


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("machine", TIMES)
def test_learns_in_the_first_dozens_of_steps(machine: str, num_rows: int) -> None:
    """96 tokens a row, which a good length makes in 40 steps: not far from the best one known from the start."""
    shares = [
        against_best([trace("sampled", row + 3 * seed) for row in range(num_rows)], TIMES[machine], seed, 96)
        for seed in range(3)
    ]
    assert sum(shares) / len(shares) >= 0.85


@pytest.mark.parametrize("machine", TIMES)
def test_holds_where_the_text_changes(machine: str) -> None:
    assert against_best([changing(row) for row in range(4)], TIMES[machine]) >= BOUND


def test_beats_every_fixed_length_where_no_fixed_length_is_right() -> None:
    assert against_best([changing(0)] * 4, TIMES["compute bound"]) > 1.05


def test_the_simulation_tells_lengths_apart() -> None:
    """The bound means something: the worst fixed lengths are far below it."""
    for machine, step_time in TIMES.items():
        rates = [simulate(FixedDraftLength(k), [trace("sampled", 0)], step_time) for k in range(MAX_DRAFTS + 1)]
        assert min(rates) < 0.9 * max(rates), machine
