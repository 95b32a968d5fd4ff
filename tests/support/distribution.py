"""Is a drafted, verified text really drawn from the model? Statistics, an exact oracle, and four wrong acceptances.

The statistic is Pearson's chi-square; its critical value is Wilson and Hilferty's approximation (good to 1% from 3 degrees
of freedom up). Cells expected fewer than 5 times are pooled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.api import SamplingParams
from edgellm_worker.engine.runtime.acceptance import Accepted, accept
from edgellm_worker.engine.runtime.noise import noise_key, uniforms
from edgellm_worker.engine.runtime.sampling import RowSampler
from edgellm_worker.engine.runtime.scores import DenseScores, Scores

Z_1E_4 = 3.719
"""One-sided normal quantile: the false-alarm rate of one test is 1e-4."""

SETTINGS = {
    "T0.7 top_p0.8 top_k20": SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    "T1.0 plain": SamplingParams(temperature=1.0),
    "T1.3 min_p0.05": SamplingParams(temperature=1.3, min_p=0.05),
}

AcceptRule = Callable[..., Accepted]


@dataclass(frozen=True, slots=True)
class ChiSquare:
    statistic: float
    degrees: int

    @property
    def critical(self) -> float:
        spread = 2.0 / (9.0 * self.degrees)
        return self.degrees * (1.0 - spread + Z_1E_4 * spread**0.5) ** 3

    @property
    def passes(self) -> bool:
        return self.statistic <= self.critical


def chi_square(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> ChiSquare:
    """Both [cells], with the same sum. Impossible cells that were seen are an infinite statistic."""
    if observed[expected == 0].any():
        return ChiSquare(np.inf, 1)
    order = np.argsort(expected)
    pooled = int(np.searchsorted(np.cumsum(expected[order]), 5.0)) if (expected < 5).any() else 0
    while 0 < pooled < expected.size and expected[order][pooled] < 5:
        pooled += 1
    few, rest = order[:pooled], order[pooled:]
    o = np.append(observed[rest], observed[few].sum())
    e = np.append(expected[rest], expected[few].sum())
    o, e = o[e > 0], e[e > 0]
    return ChiSquare(float(((o - e) ** 2 / e).sum()), max(1, o.size - 1))


def filtered(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The distribution that a row draws from, written the slow way: sort, cut to top_k, top_p, min_p, renormalise."""
    z = logits.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(z.size), -z))[: params.top_k or z.size]
    p = np.exp(z[order] - z[order[0]])
    p /= p.sum()
    kept = np.concatenate(([True], np.cumsum(p)[:-1] < params.top_p)) & (p >= params.min_p * p[0])
    out = np.zeros(z.size)
    out[order[kept]] = p[kept] / p[kept].sum()
    return out


# Mutants: each has the signature of `accept`


def temperature_ignored(sampler: RowSampler, scores: Sequence[Scores], *rest: object, **limits: object) -> Accepted:
    """Verification draws at temperature 1; the drafts and the filters stay."""
    params = sampler._params
    at_one = SamplingParams(1.0, params.top_p, params.top_k, params.min_p, seed=params.seed)
    return accept(RowSampler(at_one, ()), scores, *rest, **limits)  # type: ignore[arg-type]


def argmax_on_rejection(
    sampler: RowSampler, scores: Sequence[Scores], drafts: Sequence[int], position: int, **limits: object
) -> Accepted:
    """Where the row's own token differs from the draft, the most probable token is emitted instead."""
    right = accept(sampler, scores, drafts, position, **limits)  # type: ignore[arg-type]
    if len(right.token_ids) == right.num_accepted or right.num_accepted == len(drafts):
        return right
    best = int(scores[right.num_accepted].logits.argmax())  # type: ignore[union-attr]
    return Accepted((*right.token_ids[:-1], best), right.num_accepted)


def top_three_accepted(
    sampler: RowSampler, scores: Sequence[Scores], drafts: Sequence[int], position: int, **limits: object
) -> Accepted:
    """A draft among the target's three most probable tokens is taken as it is."""
    emitted: list[int] = []
    for score, draft in zip(scores, drafts, strict=False):
        if draft not in np.argsort(-score.logits)[:3]:  # type: ignore[union-attr]
            break
        emitted.append(draft)
        if len(emitted) == limits["max_tokens"]:
            return Accepted(tuple(emitted), len(emitted))
    rest = accept(sampler, [scores[len(emitted)]], [], position + len(emitted), stop_ids=frozenset(), max_tokens=1)
    return Accepted((*emitted, *rest.token_ids), len(emitted))


def redrawn_from_everything(
    sampler: RowSampler, scores: Sequence[Scores], drafts: Sequence[int], position: int, **limits: object
) -> Accepted:
    """A coin accepts the draft with its probability; on rejection the row draws from its whole distribution."""
    emitted: list[int] = []
    for i, draft in enumerate(drafts):
        p = filtered(scores[i].logits, sampler._params)[draft]  # type: ignore[union-attr]
        coin = float(uniforms(np.array([noise_key(~sampler._params.seed & (2**64 - 1), position + i)], np.uint64))[0])
        if coin >= p or len(emitted) == limits["max_tokens"]:
            break
        emitted.append(draft)
    if len(emitted) == limits["max_tokens"]:
        return Accepted(tuple(emitted), len(emitted))
    rest = accept(sampler, [scores[len(emitted)]], [], position + len(emitted), stop_ids=frozenset(), max_tokens=1)
    return Accepted((*emitted, *rest.token_ids), len(emitted))


MUTANTS: Mapping[str, AcceptRule] = {
    "temperature ignored in verification": temperature_ignored,
    "argmax emitted on rejection": argmax_on_rejection,
    "draft among the target's top three accepted": top_three_accepted,
    "redrawn from the full distribution": redrawn_from_everything,
}


# A model small enough to know everything about


class MarkovModel:
    """Logits of the next token given the last one: float32 [V, V]. The draft head is the same, disturbed."""

    def __init__(self, vocab_size: int = 10, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.base = rng.normal(0, 1.2, (vocab_size, vocab_size)).astype(np.float32)
        self.head = self.base + rng.normal(0, 0.7, self.base.shape).astype(np.float32)
        self.vocab_size = vocab_size

    def joint(self, params: SamplingParams, first: int, length: int = 3) -> NDArray[np.float64]:
        """The exact probability of every text of `length` tokens after `first`: [V ** length]."""
        rows = np.stack([filtered(row, params) for row in self.base])
        p = rows[first]
        for _ in range(length - 1):
            p = (p.reshape(-1, self.vocab_size)[:, :, None] * rows).reshape(-1)
        return p

    def generate(
        self, params: SamplingParams, first: int, num_drafts: int, rule: AcceptRule, *, shared: bool
    ) -> list[int]:
        """Three tokens after `first`, drafted and verified. `shared`: drafts use the row's noise, else argmax."""
        sampler, text = RowSampler(params, (first,)), [first]
        while len(text) < 4:
            drafts: list[int] = []
            for _ in range(num_drafts):
                last = (text + drafts)[-1]
                scores = DenseScores(self.head[last])
                position = len(text) + len(drafts)
                drafts.append(sampler.draft(scores, position) if shared else int(scores.logits.argmax()))
            verify = [DenseScores(self.base[token]) for token in (text[-1], *drafts)]
            accepted = rule(sampler, verify, drafts, len(text), stop_ids=frozenset(), max_tokens=4 - len(text))
            text += accepted.token_ids
        return text[1:]


def markov_texts(
    settings: SamplingParams,
    num_drafts: int,
    num_seeds: int,
    *,
    rule: AcceptRule = accept,
    first_seed: int = 0,
    shared: bool = True,
) -> NDArray[np.int64]:
    """[num_seeds, 3]: the first three tokens of one text per seed."""
    run = partial(MarkovModel().generate, first=0, num_drafts=num_drafts, rule=rule, shared=shared)
    seeds = range(first_seed, first_seed + num_seeds)
    return np.array([run(replace(settings, seed=seed)) for seed in seeds], np.int64)


def markov_tests(settings: SamplingParams, texts: NDArray[np.int64]) -> list[ChiSquare]:
    """The first token, the first two and the first three, each against their exact joint distribution."""
    model, cell, tests = MarkovModel(), np.zeros(len(texts), np.int64), []
    for length in (1, 2, 3):
        cell = cell * model.vocab_size + texts[:, length - 1]
        expected = model.joint(settings, 0, length) * len(texts)
        tests.append(chi_square(np.bincount(cell, minlength=expected.size).astype(np.float64), expected))
    return tests
