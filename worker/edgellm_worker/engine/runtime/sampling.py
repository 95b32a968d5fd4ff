"""One row's own token from the model's scores: penalties, bias, temperature, top_k, top_p, min_p, then Gumbel-max.

    temperature 0    argmax of the penalised logits, ties by lowest id
    temperature > 0  argmax over the kept tokens of  l(v) / T + G(seed, position, v)          (noise.py)

A row with a constraint (grammar.py) draws from the allowed tokens only. What is kept of them, in order, each rule
looking at what the one before left (z = penalised logits / T):

    top_k   the k largest z, ties at the boundary by lowest id; 0 is off
    top_p   the shortest prefix, by falling z and ties by lowest id, whose probability reaches top_p; at least one token
    min_p   tokens with a probability of at least min_p times the largest

The scores of one position come in two forms that give the same token: all logits, or the best candidates with the
log-sum-exp of all. Candidates are enough when nothing outside them can be drawn; `RowSampler.needs_dense` says for
which rows they are not. Log-probabilities are of the raw distribution: softmax of the logits before any of the above.

Drafts are drawn from the draft head's scores by the same rule with the same noise. The two argmaxes then agree far more
often than two independent draws would (Daliri, Musco, Suresh 2024, drafter-invariant speculative decoding), and what is
emitted is the target's own token whatever the draft was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.api import SamplingParams, TokenLogprobs
from edgellm_worker.engine.errors import RequestError, RowError
from edgellm_worker.engine.runtime.grammar import Grammar
from edgellm_worker.engine.runtime.noise import MAX_GUMBEL, MIN_GUMBEL, gumbel, position_key, seed_key
from edgellm_worker.engine.runtime.penalties import Penalties

NUM_CANDIDATES: Final = 64
"""How many candidates per position an engine hands over: enough for every top_k up to it and for top_logprobs."""

_FIRST_SORT: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class DenseScores:
    """All logits of one position: float32 [V]."""

    logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class CandidateScores:
    """The min(NUM_CANDIDATES, V) or more best logits of one position, falling, equal ones by rising id: [K] and [K].

    `log_sum_exp` is over the whole vocabulary.
    """

    values: NDArray[np.float32]
    ids: NDArray[np.integer]
    log_sum_exp: float


Scores = DenseScores | CandidateScores


@dataclass(frozen=True, slots=True)
class Draw:
    """`logprobs` is None unless the row asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` naming the field that no sampler can serve."""
    in_range = {
        "temperature": 0 <= params.temperature < math.inf,
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k >= 0,
        "min_p": 0 <= params.min_p <= 1,
        "repetition_penalty": 0 < params.repetition_penalty < math.inf,
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "presence_penalty": math.isfinite(params.presence_penalty),
        "seed": 0 <= params.seed < 1 << 64,
        "top_logprobs": params.top_logprobs is None or 0 <= params.top_logprobs <= vocab_size,
    }
    for name, good in in_range.items():
        if not good:
            raise RequestError(name, f"{getattr(params, name)} is out of range")
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise RequestError("logit_bias", f"token id {token_id} is outside the vocabulary of {vocab_size}")
        if not math.isfinite(bias):
            raise RequestError("logit_bias", f"bias of token {token_id} is not a finite number")


def top_indices(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Indices of the k largest of values [V], falling, equal ones by rising index."""
    if k < values.size:
        threshold = np.partition(values, values.size - k)[values.size - k]
        above = np.flatnonzero(values > threshold)
        level = np.flatnonzero(values == threshold)[: k - above.size]
        chosen = np.sort(np.concatenate((above, level)))
    else:
        chosen = np.arange(values.size)
    return chosen[np.argsort(-values[chosen], kind="stable")]


def log_sum_exp(logits: NDArray[np.floating]) -> float:
    """The log-sum-exp of logits [V], in float64."""
    top = float(logits.max())
    return top + math.log(float(np.exp(logits - top, dtype=np.float64).sum()))


class RowSampler:
    """Draws the tokens of one row. `commit` is the only thing that changes it: `draw` and `draft` are pure."""

    __slots__ = (
        "_ahead",
        "_counts_output",
        "_grammar",
        "_log_min_p",
        "_nucleus",
        "_params",
        "_penalties",
        "_seed_key",
        "is_greedy",
        "needs_dense",
        "top_k",
    )

    top_k: Final[int]
    is_greedy: Final[bool]
    needs_dense: Final[bool]
    """Whether `NUM_CANDIDATES` candidates cannot serve this row exactly."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], grammar: Grammar | None = None) -> None:
        """`grammar`, at its start, is the row's from now on."""
        self._params = params
        self._grammar = grammar
        self._ahead: tuple[int, Grammar] | None = None  # the grammar after the drafts before this position
        self._penalties = Penalties(params, prompt_token_ids)
        self._counts_output = self._penalties.depend_on_output
        self._log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self._nucleus = params.top_p if params.top_p < 1.0 else math.inf
        self.top_k = params.top_k
        self._seed_key = seed_key(params.seed)
        self.is_greedy = params.temperature == 0.0
        is_wide = (params.top_logprobs or 0) > NUM_CANDIDATES
        is_cut = self.is_greedy or 0 < params.top_k <= NUM_CANDIDATES
        self.needs_dense = is_wide or not is_cut or not self._penalties.is_neutral or grammar is not None

    def commit(self, token_id: int) -> None:
        """The token became output: it counts in the penalties and the grammar from now on."""
        if self._counts_output:
            self._penalties.count(token_id)
        if self._grammar is not None:
            self._grammar.take(token_id)
            self._ahead = None

    def draw(self, scores: Scores, position: int) -> Draw:
        """The row's own token at absolute index `position` of prompt + output.

        Raises `RowError` when the scores are not numbers, `ValueError` for candidates where `needs_dense`.
        """
        if isinstance(scores, CandidateScores) and self.needs_dense:
            raise ValueError(f"candidates cannot serve {self._params}")
        return self.with_logprobs(self._choose(scores, position), scores)

    def draft(self, scores: Scores, position: int) -> int:
        """A proposal for `position` from the draft head's scores; candidates will do, a draft need not be exact.

        With a grammar, drafts of consecutive positions are taken to follow each other.
        """
        if self._grammar is None or isinstance(scores, CandidateScores):
            return self._choose(scores, position)
        follows = self._ahead is not None and self._ahead[0] == position
        grammar = self._ahead[1] if self._ahead is not None and follows else self._grammar.copy()
        token_id = self._choose_dense(scores.logits, position, grammar)
        grammar.take(token_id)
        self._ahead = (position + 1, grammar)
        return token_id

    def with_logprobs(self, token_id: int, scores: Scores) -> Draw:
        """The token with the raw log-probabilities the row asked for."""
        num_top = self._params.top_logprobs
        if num_top is None:
            return Draw(token_id)
        if isinstance(scores, DenseScores):
            logits, total = scores.logits, log_sum_exp(scores.logits)
            best = top_indices(logits, num_top) if num_top else np.empty(0, np.int64)
            own, top_ids, top_values = float(logits[token_id]), best.tolist(), logits[best].tolist()
        else:
            total, ids, values = scores.log_sum_exp, scores.ids.tolist(), scores.values.tolist()
            own, top_ids, top_values = values[ids.index(token_id)], ids[:num_top], values[:num_top]
        top = tuple([(i, v - total) for i, v in zip(top_ids, top_values, strict=True)])
        return Draw(token_id, TokenLogprobs(logprob=own - total, top=top))

    def _choose(self, scores: Scores, position: int) -> int:
        if isinstance(scores, DenseScores):
            return self._choose_dense(scores.logits, position, self._grammar)
        _require_finite(scores.values[0])
        if self.is_greedy:
            return int(scores.ids[0])
        width = self._params.top_k or None
        values, ids = scores.values[None, :width].astype(np.float64), scores.ids[None, :width].astype(np.int64)
        return _race(values, ids, self.keys((position,)), self.rule())[0]

    def _choose_dense(self, raw: NDArray[np.float32], position: int, grammar: Grammar | None) -> int:
        logits: NDArray[np.floating] = raw if self._penalties.is_neutral else self._penalties.applied(raw)
        if grammar is not None:
            logits = np.where(grammar.allowed(), logits, -np.inf)
        best = int(logits.argmax())
        _require_finite(logits[best])
        if self.is_greedy:
            return best
        params = self._params
        if params.top_k:
            chosen = top_indices(logits, params.top_k)
            values = logits[None, chosen].astype(np.float64)
            return _race(values, chosen[None], self.keys((position,)), self.rule())[0]
        if params.top_p < 1.0:
            return self._choose_nucleus(logits, position)
        floor = max(self._log_min_p, MIN_GUMBEL - MAX_GUMBEL) * params.temperature
        chosen = np.flatnonzero(logits >= logits[best] + floor)
        z = (logits[chosen].astype(np.float64) - float(logits[best])) / params.temperature
        z += gumbel(self.keys((position,))[0], chosen)
        return int(chosen[z.argmax()])

    def _choose_nucleus(self, logits: NDArray[np.floating], position: int) -> int:
        """top_p over the whole vocabulary: only as many logits are sorted as the prefix needs."""
        z = logits.astype(np.float64)
        z -= z.max()
        z /= self._params.temperature
        weights = np.exp(z)
        total = weights.sum()
        chosen = top_indices(logits, _FIRST_SORT)
        if weights[chosen].sum() <= self._params.top_p * total:
            chosen = top_indices(logits, logits.size)
        values = logits[None, chosen].astype(np.float64)
        return _race(values, chosen[None], self.keys((position,)), self.rule(total))[0]

    def keys(self, positions: Sequence[int]) -> NDArray[np.uint64]:
        """The noise keys of these positions: [N, 1]."""
        return np.array([[position_key(self._seed_key, position)] for position in positions], np.uint64)

    def rule(self, total: float | None = None) -> _Rule:
        """What a race of this row's tokens goes by."""
        return _Rule(self._params.temperature, self._nucleus, self._log_min_p, total)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a race needs of the parameters: numbers, or a column [N, 1] with one for each position.

    top_p is infinite and log_min_p is -inf where they are off. `total` is the sum of exp(z - z_max) over everything
    that top_p counts, where that is more than is listed.
    """

    temperature: float | NDArray[np.float64]
    top_p: float | NDArray[np.float64]
    log_min_p: float | NDArray[np.float64]
    total: float | None = None


def _race(values: NDArray[np.float64], ids: NDArray[np.int64], keys: NDArray[np.uint64], rule: _Rule) -> list[int]:
    """The winning token of each position; values and ids [N, K], falling by value and cut to top_k; keys [N, 1]."""
    z = (values - values[:, :1]) / rule.temperature
    score = z + gumbel(keys, ids)
    if np.min(rule.top_p) < 1.0:
        reached = np.exp(z).cumsum(axis=1)
        whole = reached[:, -1:] if rule.total is None else rule.total
        score[:, 1:][reached[:, :-1] >= rule.top_p * whole] = -np.inf
    if np.max(rule.log_min_p) > -np.inf:
        score[z < rule.log_min_p] = -np.inf
    winners: list[int] = ids[np.arange(len(ids)), score.argmax(axis=1)].tolist()
    return winners


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """A row's part in a race of several rows."""

    index: int
    sampler: RowSampler
    scores: Sequence[CandidateScores]
    position: int


def draw_ahead(rows: Sequence[tuple[RowSampler, Sequence[Scores], int]]) -> list[list[int] | None]:
    """The tokens of several rows at consecutive positions in one go, each as `draw` gives it. Per row: sampler, scores,
    first position. None for a row whose tokens must be drawn one by one: a committed token would change its next
    distribution, it is greedy, its scores are dense, of another width than its neighbours', or not numbers.
    """
    drawn: list[list[int] | None] = [None] * len(rows)
    racing: list[_Ahead] = []
    for index, (sampler, scores, position) in enumerate(rows):
        narrow = [s for s in scores if isinstance(s, CandidateScores)]
        if sampler.needs_dense or sampler.is_greedy or len(narrow) != len(scores):
            continue
        if {s.ids.size for s in narrow} == {(racing[0].scores if racing else narrow)[0].ids.size}:
            racing.append(_Ahead(index, sampler, narrow, position))
    if not racing:
        return drawn
    winners = iter(_race_rows(racing))
    for row in racing:
        tokens = [next(winners) for _ in row.scores]
        if all(math.isfinite(s.values[0]) for s in row.scores):
            drawn[row.index] = tokens
    return drawn


def _race_rows(rows: Sequence[_Ahead]) -> list[int]:
    params = [(row.sampler.top_k, row.sampler.rule()) for row in rows for _ in row.scores]
    width = max(top_k for top_k, _ in params)
    values = np.array([s.values[:width] for row in rows for s in row.scores], np.float64)
    ids = np.array([s.ids[:width] for row in rows for s in row.scores], np.int64)
    if any(top_k < values.shape[1] for top_k, _ in params):
        values[np.arange(values.shape[1]) >= np.array([[top_k] for top_k, _ in params])] = -np.inf
    keys = np.concatenate([row.sampler.keys(range(row.position, row.position + len(row.scores))) for row in rows])
    columns = np.array([(rule.temperature, rule.top_p, rule.log_min_p) for _, rule in params])
    rule = _Rule(columns[:, :1], columns[:, 1:2], columns[:, 2:])
    with np.errstate(invalid="ignore"):  # a row that is not numbers is told apart by the caller
        return _race(values, ids, keys, rule)


def _require_finite(best: np.floating) -> None:
    if not np.isfinite(best):
        raise RowError(f"the model's scores are not numbers: the largest is {best}")
