"""Host time per step: what the loop, sampling, acceptance and text cost beside the device.

    python bench/host_sampling.py [STEPS] [--profile KIND]

8 rows x 6 positions at a vocabulary of 250 000. The product's own engine runs over an executor that replays recorded
rounds: 64 candidates per position, and all logits for rows that ask for them. Every draft is accepted, the most work.
"engine" is one `step()`, from the round's arrays to its report; "text" is the detokenisation of its tokens. The floor
is measured in the same run: one bare numpy race over 48 x 20 candidates (hash, noise, argmax).

Times are the thread's CPU time; a busy neighbour still takes caches and clock, which the floor shows too. Run with
OMP_NUM_THREADS=1. `--profile` prints where one kind's time goes instead.
"""

import argparse
import copy
import cProfile
import pstats
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

import edgellm_worker
from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, SamplingParams
from edgellm_worker.engine.runtime.draft_length import FixedDraftLength
from edgellm_worker.engine.runtime.executor import (
    DraftChooser,
    PrefillChunk,
    PrefillOutput,
    RoundInput,
    RoundOutput,
    StartedPrefill,
    StartedRound,
)
from edgellm_worker.engine.runtime.noise import gumbel, noise_key
from edgellm_worker.engine.runtime.rows import Row
from edgellm_worker.engine.runtime.scores import (
    NUM_CANDIDATES,
    Candidates,
    RoundScores,
    log_sum_exp,
    top_indices,
)
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine, SpeculativeOptions
from edgellm_worker.tokenizer import OutputText, Tokenizer

ROWS, POSITIONS, VOCABULARY = 8, 6, 250_000
WITH_TEXT = 8000
"""Ids of the tiny checkpoint's tokenizer; the rest of the vocabulary is there, but never likely."""
NUM_RECORDED = 3
MOST_TOKENS = 1_000_000

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
LOGPROBS = replace(SAMPLED, top_logprobs=5)
PENALISED = replace(SAMPLED, presence_penalty=1.5, repetition_penalty=1.05)
KINDS: Mapping[str, Sequence[SamplingParams]] = {
    "greedy": (GREEDY,),
    "sampled": (SAMPLED,),
    "mixed": (GREEDY, SAMPLED, replace(SAMPLED, temperature=1.0, top_k=50), PENALISED),
    "top_logprobs": (LOGPROBS,),
    "penalties": (PENALISED,),
    "greedy, penalties": (replace(GREEDY, presence_penalty=1.5),),
    "top_p alone": (SamplingParams(temperature=0.7, top_p=0.9),),
    "dense: plain": (SamplingParams(temperature=1.0),),
    "dense: hot top_p": (SamplingParams(temperature=1.2, top_p=0.9),),
    "dense: top_k 200": (SamplingParams(temperature=1.0, top_k=200),),
    "dense: top_logprobs 100": (SamplingParams(top_logprobs=100),),
}


class Replay:
    """`Executor` of recorded rounds, over and over. `drafts` [B, N] of round after round; None: make them."""

    num_slots, can_draft, runs_ahead, follows = ROWS, True, True, False
    memory_bytes: Mapping[str, int] = {}

    def __init__(self, drafts: Sequence[np.ndarray] | None) -> None:
        self.made: list[np.ndarray] = []
        self.rows: Sequence[Row] = ()
        self._drafts = drafts
        self._num_rounds = 0

    def clear(self, slot: int) -> None: ...
    def swap(self, a: int, b: int) -> None: ...
    def close(self) -> None: ...

    def start_prefill(self, slot: int, chunk: PrefillChunk) -> StartedPrefill:
        del chunk
        logits, _ = recorded()[0]
        output = PrefillOutput(RoundScores(1, None, lambda _row, _position: logits[slot, 0]), 0.0)
        return StartedPrefill(lambda: True, lambda: output)

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> StartedRound:
        del batch, choosers
        logits, candidates = recorded()[self._num_rounds % NUM_RECORDED]
        scores = RoundScores(POSITIONS, candidates, lambda row, position: logits[row, position])
        if self._drafts is None:
            tokens = [own_tokens(row, scores, i) for i, row in enumerate(self.rows)]
            self.made.append(np.array(tokens, np.int32)[:, :num_drafts])
        output = RoundOutput((self._drafts or self.made)[self._num_rounds], scores, 0.0, 0.0)
        self._num_rounds += 1
        return lambda: output

    def follow_round(self, num_drafts: int) -> StartedRound:
        raise NotImplementedError(num_drafts)


@cache
def recorded() -> list[tuple[np.ndarray, Candidates]]:
    """Logits [B, N, V], falling with the rank as text's do (top_p 0.9 is some 30 tokens), and their candidates."""
    rng, rounds = np.random.default_rng(0), []
    for _ in range(NUM_RECORDED):
        logits = rng.normal(-18.0, 2.0, (ROWS, POSITIONS, VOCABULARY)).astype(np.float32)
        ranks = 1.0 + rng.permuted(np.tile(np.arange(WITH_TEXT), (ROWS, POSITIONS, 1)), axis=-1)
        logits[:, :, :WITH_TEXT] = 10.0 - 1.5 * np.log(ranks) + rng.normal(0, 0.2, ranks.shape)
        ids = np.array([[top_indices(p, NUM_CANDIDATES) for p in row] for row in logits], np.int32)
        sums = np.array([[log_sum_exp(p) for p in row] for row in logits], np.float32)
        rounds.append((logits, Candidates(np.take_along_axis(logits, ids, axis=-1), ids, sums)))
    return rounds


def own_tokens(row: Row, scores: RoundScores, index: int) -> list[int]:
    sampler, tokens = copy.deepcopy(row.sampler), []
    for token in sampler.draw_each(scores.row(index), row.position + 1):
        sampler.commit(token)
        tokens.append(token)
    return tokens


class Host:
    """One kind's engine with its rows' texts; `step` gives the seconds of engine and text."""

    def __init__(self, params: Sequence[SamplingParams], tokenizer: Tokenizer, drafts: Sequence[np.ndarray] | None):
        self.executor = Replay(drafts)
        limits = EngineLimits(ROWS, 64, MOST_TOKENS, POSITIONS, POSITIONS - 1, POSITIONS - 1, VOCABULARY)
        traits = EngineTraits("replay", in_flight=True, seeded=True, drafts_when_sampled=True, speculative_method="mtp")
        options = SpeculativeOptions(limits, traits, FixedDraftLength(POSITIONS - 1))
        self.engine = SpeculativeEngine(self.executor, options)
        self.executor.rows = self.engine._rows.running  # noqa: SLF001 - the drafts are the rows' own tokens
        self._texts: list[OutputText] = []
        for row in range(ROWS):
            sampling = replace(params[row % len(params)], seed=row)
            request = GenerationRequest((1, 2, 3), MOST_TOKENS - 50, sampling, frozenset({VOCABULARY - 1}))
            self.engine.add(row, request)
            self._texts.append(tokenizer.output_text(["\n\nUser:", "<end>"]))
        self.engine.step()

    def step(self) -> tuple[float, float]:
        began = time.thread_time()
        report = self.engine.step()
        stepped = time.thread_time()
        for update in report.updates:
            self._texts[update.row_id].push(update.token_ids)
        ended = time.thread_time()
        assert all(len(update.token_ids) == POSITIONS for update in report.updates)
        return stepped - began, ended - stepped


def rehearsed(params: Sequence[SamplingParams], tokenizer: Tokenizer, num_steps: int) -> Host:
    """The drafts of every round are found by a first run, so that making them is not measured."""
    first = Host(params, tokenizer, None)
    for _ in range(num_steps):
        first.engine.step()
    return Host(params, tokenizer, first.executor.made)


def floor_ms(num_steps: int) -> float:
    ids = np.arange(ROWS * POSITIONS * 20).reshape(-1, 20)
    z = np.zeros(ids.shape)
    keys = np.array([[noise_key(1, t)] for t in range(len(ids))], np.uint64)
    times = []
    for _ in range(num_steps):
        began = time.thread_time()
        (z + gumbel(keys, ids)).argmax(axis=1)
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e3


def profile(host: Host, num_steps: int) -> None:
    profiler = cProfile.Profile()
    for _ in range(num_steps):
        profiler.enable()
        host.step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="?", type=int, default=300)
    parser.add_argument("--profile", choices=KINDS)
    arguments = parser.parse_args()
    tokenizer = Tokenizer(Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp")
    if arguments.profile:
        profile(rehearsed(KINDS[arguments.profile], tokenizer, arguments.steps), arguments.steps)
        return
    print(
        f"{ROWS} rows x {POSITIONS} positions, vocabulary {VOCABULARY}; ms per step: median (least) of engine and text"
    )
    print(f"{'floor':26} {floor_ms(arguments.steps):8.3f}")
    for name, params in KINDS.items():
        num_steps = max(5, arguments.steps // 30) if name.startswith("dense") else arguments.steps
        host = rehearsed(params, tokenizer, num_steps)
        found = [host.step() for _ in range(num_steps)]
        engine, text = ([1e3 * seconds for seconds in times] for times in zip(*found, strict=True))
        whole = [sum(both) for both in zip(engine, text, strict=True)]
        shown = "   ".join(
            f"{name} {statistics.median(times):8.3f} ({min(times):.3f})"
            for name, times in (("whole", whole), ("engine", engine), ("text", text))
        )
        print(f"{name:26} {shown}")


if __name__ == "__main__":
    main()
