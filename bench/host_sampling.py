"""Host time per step: sampling, acceptance and detokenisation of 8 rows x 6 positions at a vocabulary of 250 000.

    python bench/host_sampling.py [STEPS]

Every row gets 64 candidates per position, as an engine hands them over; every draft is accepted, the most work. The
floor is measured in the same run: one numpy race over all 48 x 20 candidates at once (hash, noise, argmax), no more.
Times are the thread's CPU time, so that a busy machine does not count; run with OMP_NUM_THREADS=1.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import edgellm_worker
from edgellm_worker.engine.api import SamplingParams
from edgellm_worker.engine.runtime.acceptance import Accepted, Verified, accept_rows
from edgellm_worker.engine.runtime.noise import gumbel, noise_key
from edgellm_worker.engine.runtime.sampling import NUM_CANDIDATES, CandidateScores, RowSampler, log_sum_exp, top_indices
from edgellm_worker.tokenizer import Tokenizer

ROWS, POSITIONS, VOCABULARY = 8, 6, 250_000
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    "sampled, top_logprobs 5": SamplingParams(temperature=0.7, top_p=0.8, top_k=20, top_logprobs=5),
}
Step = Callable[[int], None]


def scores_of_a_step(rng: np.random.Generator) -> list[list[CandidateScores]]:
    """The candidates' ids are of the tiny checkpoint's vocabulary, so that they have text."""
    rows = []
    for _ in range(ROWS):
        row = []
        for _ in range(POSITIONS):
            logits = rng.normal(0, 3, VOCABULARY).astype(np.float32)
            best = top_indices(logits, NUM_CANDIDATES)
            ids = rng.choice(8000, NUM_CANDIDATES, replace=False).astype(np.int32)
            row.append(CandidateScores(logits[best], ids, log_sum_exp(logits)))
        rows.append(row)
    return rows


def whole_step(params: SamplingParams, tokenizer: Tokenizer, rows: list[list[CandidateScores]]) -> Step:
    samplers = [RowSampler(params, (1,)) for _ in rows]
    texts = [tokenizer.output_text(["\n\nUser:", "<end>"]) for _ in rows]
    drafts = [
        [sampler.draw(s, 100 + i).token_id for i, s in enumerate(scores)][:-1]
        for sampler, scores in zip(samplers, rows, strict=True)
    ]

    def step(_: int) -> None:
        rows_verified = [
            Verified(sampler, scores, guesses, 100, frozenset({7}), 999)
            for sampler, scores, guesses in zip(samplers, rows, drafts, strict=True)
        ]
        for text, accepted in zip(texts, accept_rows(rows_verified), strict=True):
            assert isinstance(accepted, Accepted)
            assert accepted.num_accepted == POSITIONS - 1
            text.push([draw.token_id for draw in accepted.draws])

    return step


def floor_step() -> Step:
    ids = np.arange(ROWS * POSITIONS * 20).reshape(-1, 20)
    z = np.zeros(ids.shape)
    keys = np.array([[noise_key(1, t)] for t in range(len(ids))], np.uint64)

    def step(_: int) -> None:
        (z + gumbel(keys, ids)).argmax(axis=1)

    return step


def median_ms(step: Step, num_steps: int) -> float:
    times = []
    for i in range(num_steps):
        began = time.thread_time()
        step(i)
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e3


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    tokenizer = Tokenizer(Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp")
    rows = scores_of_a_step(np.random.default_rng(0))
    floor = median_ms(floor_step(), num_steps)
    print(f"floor {floor:.3f} ms per step; {ROWS} rows x {POSITIONS} positions, vocabulary {VOCABULARY}")
    for name, params in KINDS.items():
        took = median_ms(whole_step(params, tokenizer, rows), num_steps)
        verdict = "under" if took < 1.0 else "OVER"
        print(f"{name:26} {took:.3f} ms per step (median), {took / floor:.1f} x the floor, {verdict} 1 ms")


if __name__ == "__main__":
    main()
