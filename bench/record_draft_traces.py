"""Records what the simulation of draft lengths runs on: how many drafts the tiny checkpoint's head gets right at every
position of a text, and how long a step takes by rows and drafts.

    python bench/record_draft_traces.py > tests/golden/draft_traces.json

The text does not depend on the drafts, so one number per position says what any draft length would gain there: the
engine is made to emit one token a round, and the length of the agreeing prefix is noted. Step times are the least of
several rounds, in milliseconds, of the reference engine on the machine that recorded them.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import replace

from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.runtime import speculative
from edgellm_worker.engine.runtime.acceptance import Accepted, accept
from edgellm_worker.engine.runtime.executor import Int
from edgellm_worker.engine.runtime.rows import Row
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import RoundScores
from tests.support.tiny_engine import generate, greedy, script_drafts, short_prompts, tiny_engine

MAX_DRAFTS = 6
NUM_TOKENS = 64
ROWS = (1, 2, 4, 8)


class Recorder:
    """An acceptance that emits the first token only and notes how many drafts were right, by row."""

    def __init__(self) -> None:
        self.traces: dict[RowSampler, list[int]] = {}

    def accept_rows(self, rows: Sequence[Row], drafts: Int, scores: RoundScores) -> list[Accepted]:
        outcomes = []
        for i, row in enumerate(rows):
            guesses, position = drafts[i].tolist(), row.position + 1
            whole = accept(
                row.sampler, scores.row(i), guesses, position, stop_ids=frozenset(), max_tokens=MAX_DRAFTS + 1
            )
            if guesses:
                self.traces.setdefault(row.sampler, []).append(whole.num_accepted)
            outcomes.append(Accepted(whole.token_ids[:1], 0))
        return outcomes


def traces(requests: list[GenerationRequest]) -> list[str]:
    recorder, original = Recorder(), speculative.accept_rows
    speculative.accept_rows = recorder.accept_rows
    try:
        engine = tiny_engine(8, MAX_DRAFTS)
        generate(engine, requests)
    finally:
        speculative.accept_rows = original
    return ["".join(map(str, trace)) for trace in recorder.traces.values()]


def step_ms(num_rows: int, num_drafts: int) -> float:
    engine = tiny_engine(num_rows, MAX_DRAFTS)
    script = script_drafts(engine, [num_drafts])
    prompts = short_prompts()[:num_rows]
    generate(engine, [replace(greedy(p, 40), eos_token_ids=frozenset()) for p in prompts])
    full = [o.step_s for o in script.observations if o.num_rows == num_rows]
    return round(min(full) * 1e3, 3)


def main() -> None:
    prompts = short_prompts()
    sampled = [
        GenerationRequest(p.prompt_ids, NUM_TOKENS, SamplingParams(temperature=1.0, seed=i))
        for i, p in enumerate(prompts)
    ]
    found = {
        "greedy": traces([replace(greedy(p, NUM_TOKENS), eos_token_ids=frozenset()) for p in prompts]),
        "sampled": traces(sampled),
    }
    times = {str(n): [step_ms(n, k) for k in range(MAX_DRAFTS + 1)] for n in ROWS}
    made_on = f"{platform.machine()}, reference engine, numpy"
    print(json.dumps({"model": "tiny-qwen3.5-mtp", "made_on": made_on, "step_ms": times, "accepted": found}, indent=1))


if __name__ == "__main__":
    main()
