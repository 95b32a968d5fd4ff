"""Sampled text of the tiny checkpoint against the model's own distribution.

The vocabulary is too large for cells of whole texts, so the cells are ranks: each token's place in the exact conditional
distribution of its own context (computed from scratch, one pass over prompt and text). The expected count of a rank is the
sum of its probabilities over all contexts that occurred.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.runtime import speculative
from edgellm_worker.engine.runtime.acceptance import Accepted
from edgellm_worker.engine.runtime.executor import Int
from edgellm_worker.engine.runtime.rows import Row
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import DenseScores, RoundScores
from edgellm_worker.tokenizer import Tokenizer
from tests.support.distribution import AcceptRule, ChiSquare, chi_square, filtered
from tests.support.tiny_engine import CHECKPOINT, generate, logits_of, tiny_engine, tiny_model

PROMPTS = ("def get_", "self.", "The ", "if ")
"""More than 1 nat of first-token entropy at every setting tested."""

NUM_TOKENS = 3
NUM_RANKS = 16

Text = tuple[int, ...]


@cache
def prompt_ids() -> tuple[Text, ...]:
    tokenizer = Tokenizer(CHECKPOINT)
    return tuple(tokenizer.encode(prompt) for prompt in PROMPTS)


@cache
def next_logits(context: Text, num_prompt: int) -> np.ndarray:
    """The logits of the tokens at num_prompt .. len(context): [., V]."""
    return logits_of(tiny_model(), NumpyOps(), context)[num_prompt - 1 :]


def texts(params: SamplingParams, num_drafts: int, seeds: Sequence[int], batch_size: int = 8) -> list[list[Text]]:
    """Per prompt, the first tokens of one text per seed."""
    engine = tiny_engine(batch_size, num_drafts, capacity=64)
    return [
        generate(engine, [GenerationRequest(ids, NUM_TOKENS, replace(params, seed=seed)) for seed in seeds])
        for ids in prompt_ids()
    ]


def rank_tests(params: SamplingParams, found: list[list[Text]]) -> list[ChiSquare]:
    """One test per position of the text."""
    observed, expected = np.zeros((2, NUM_TOKENS, NUM_RANKS + 1))
    for ids, of_prompt in zip(prompt_ids(), found, strict=True):
        for text in of_prompt:
            logits = next_logits((*ids, *text[:-1]), len(ids))
            for t in range(NUM_TOKENS):
                p = filtered(logits[t], params)
                order = np.lexsort((np.arange(p.size), -p))[:NUM_RANKS]
                expected[t, :NUM_RANKS] += p[order]
                expected[t, NUM_RANKS] += max(0.0, 1.0 - p[order].sum())
                rank = np.flatnonzero(order == text[t])
                observed[t, rank[0] if rank.size else NUM_RANKS] += 1
    expected[expected < 1e-9 * expected.sum()] = 0.0
    return [chi_square(observed[t], expected[t]) for t in range(NUM_TOKENS)]


def use_rule(monkeypatch: object, rule: AcceptRule) -> None:
    """Put a wrong acceptance into the engine's loop, over argmax drafts: drafts that share the row's noise mostly are its
    own tokens and hide the fault.
    """

    def accept_rows(rows: Sequence[Row], drafts: Int, scores: RoundScores) -> list[Accepted]:
        return [
            rule(
                row.sampler,
                scores.row(i),
                drafts[i].tolist(),
                row.position + 1,
                stop_ids=row.request.eos_token_ids,
                max_tokens=row.num_left,
            )
            for i, row in enumerate(rows)
        ]

    def draft(_: RowSampler, scores: DenseScores, position: int) -> int:
        del position
        return int(scores.logits.argmax())

    monkeypatch.setattr(speculative, "accept_rows", accept_rows)  # type: ignore[attr-defined]
    monkeypatch.setattr(RowSampler, "draft", draft)  # type: ignore[attr-defined]
