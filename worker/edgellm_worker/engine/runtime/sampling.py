"""One row's own token from the model's scores: penalties, bias, temperature, top_k, top_p, min_p, then Gumbel-max.

    temperature 0    argmax of the penalised logits, ties by lowest id
    temperature > 0  argmax over the kept tokens of  l(v) / T + G(seed, position, v)          (noise.py)

A row with a constraint (grammar.py) draws from the allowed tokens only. What is kept of them, in order, each rule
looking at what the one before left (z = penalised logits / T):

    top_k   the k largest z, ties at the boundary by lowest id; 0 is off
    top_p   the shortest prefix, by falling z and ties by lowest id, whose probability reaches top_p; at least one token
    min_p   tokens with a probability of at least min_p times the largest

Candidates are enough when nothing outside them can be drawn (race.py). `RowSampler.needs_dense` says for which rows
they never are; for the others all logits are read where a draw needs them. Log-probabilities are of the raw
distribution: softmax of the logits before any of the above.

Drafts are drawn from the draft head's scores by the same rule with the same noise. The two argmaxes then agree far more
often than two independent draws would (Daliri, Musco, Suresh 2024, drafter-invariant speculative decoding), and what is
emitted is the target's own token whatever the draft was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.api import SamplingParams, TokenLogprobs
from edgellm_worker.engine.errors import RequestError, RowError
from edgellm_worker.engine.runtime.grammar import Grammar
from edgellm_worker.engine.runtime.noise import MAX_GUMBEL, MIN_GUMBEL, gumbel, lucky_tokens, position_key, seed_key
from edgellm_worker.engine.runtime.penalties import Penalties, penalised_ahead
from edgellm_worker.engine.runtime.race import Edits, Rule, draw_block, race
from edgellm_worker.engine.runtime.scores import (
    NUM_CANDIDATES,
    Candidates,
    CandidateScores,
    DenseScores,
    Scores,
    log_sum_exp,
    top_indices,
)

_SORTED: Final = (64, 1024, 16_384)
"""How many of the best tokens are sorted for a nucleus, one after the other, before all are."""
_SUM_SLACK: Final = 3e-6
_U_SLACK: Final = 1e-9


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


class RowSampler:
    """Draws the tokens of one row. `commit` is the only thing that changes it: `draw` and `draft` are pure."""

    __slots__ = (
        "_grammar",
        "_guess",
        "_params",
        "draws_ahead",
        "has_memory",
        "is_plain",
        "needs_dense",
        "penalties",
        "rule",
        "wants_logprobs",
    )

    rule: Final[Rule]
    penalties: Final[Penalties]
    needs_dense: Final[bool]
    """Whether `NUM_CANDIDATES` candidates can never serve this row exactly."""
    has_memory: Final[bool]
    """Whether a committed token changes what is drawn next."""
    draws_ahead: Final[bool]
    """Whether the tokens of several positions can be drawn before the first is committed."""
    wants_logprobs: Final[bool]
    is_plain: Final[bool]
    """Whether it draws the best raw score, whatever was emitted, and candidates do for it."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], grammar: Grammar | None = None) -> None:
        """`grammar`, at its start, is the row's from now on."""
        self._params = params
        self._grammar = grammar
        self._guess: tuple[int, Grammar] | None = None  # the grammar after the drafts before this position
        self.penalties = Penalties(params, prompt_token_ids)
        self.rule = Rule(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p if params.top_p < 1.0 else math.inf,
            log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
            seed_key=seed_key(params.seed),
        )
        self.has_memory = self.penalties.depend_on_output or grammar is not None
        self.wants_logprobs = params.top_logprobs is not None
        is_wide = (params.top_logprobs or 0) > NUM_CANDIDATES
        self.needs_dense = is_wide or not _may_be_narrow(params) or not self.penalties.only_lower
        self.draws_ahead = not self.needs_dense and grammar is None
        self.is_plain = self.draws_ahead and self.penalties.is_neutral and not params.temperature

    def commit(self, token_id: int) -> None:
        """The token became output: it counts in the penalties and the grammar from now on."""
        if not self.has_memory:
            return
        self.penalties.count(token_id)
        if self._grammar is not None:
            self._grammar.take(token_id)
            self._guess = None

    def draw(self, scores: Scores, position: int) -> Draw:
        """The row's own token at absolute index `position` of prompt + output.

        Raises `RowError` when the scores are not numbers, `ValueError` for candidates that cannot serve and have no
        logits behind them.
        """
        return self.with_logprobs(self._choose(scores, position, self._grammar), scores)

    def draw_each(self, scores: Sequence[Scores], position: int) -> Iterator[int]:
        """The row's own tokens at positions from `position` on, each drawn when it is asked for: what was committed in
        between counts. Raises as `draw`.
        """
        for i, score in enumerate(scores):
            yield self._choose(score, position + i, self._grammar)

    def draft(self, scores: Scores, position: int) -> int:
        """A proposal for `position` from the draft head's scores.

        With a grammar, drafts of consecutive positions are taken to follow each other.
        """
        if self._grammar is None:
            return self._choose(scores, position, None)
        follows = self._guess is not None and self._guess[0] == position
        grammar = self._guess[1] if self._guess is not None and follows else self._grammar.copy()
        token_id = self._choose(scores, position, grammar)
        grammar.take(token_id)
        self._guess = (position + 1, grammar)
        return token_id

    def with_logprobs(self, token_id: int, scores: Scores) -> Draw:
        """The token with the raw log-probabilities the row asked for."""
        if not self.wants_logprobs:
            return Draw(token_id)
        return Draw(token_id, self.logprobs((token_id,), (scores,))[0])

    def logprobs(self, token_ids: Sequence[int], scores: Candidates | Sequence[Scores]) -> tuple[TokenLogprobs, ...]:
        """Raw log-probabilities of tokens that were drawn, from the scores they were drawn from, in order."""
        num_top = self._params.top_logprobs or 0
        if isinstance(scores, Candidates):
            return _listed_logprobs(token_ids, scores, num_top)
        return tuple([_logprobs(token_id, score, num_top) for token_id, score in zip(token_ids, scores, strict=False)])

    def _choose(self, scores: Scores, position: int, grammar: Grammar | None) -> int:
        if isinstance(scores, DenseScores):
            return self._choose_dense(scores.logits, position, grammar)
        if not self.needs_dense:
            _require_finite(scores.values[0])
            block = Candidates(scores.values[None, None], scores.ids[None, None], np.array([[scores.log_sum_exp]]))
            is_raw = grammar is None and self.penalties.is_neutral
            edits = None if is_raw else Edits([0], partial(self._edit, grammar))
            (token_ids,) = draw_block([self.rule], block, [position], edits)
            if token_ids is not None:
                return token_ids[0]
        if scores.read_dense is None:
            raise ValueError(f"candidates cannot serve {self._params}")
        return self._choose_dense(scores.read_dense().logits, position, grammar)

    def _edit(
        self, grammar: Grammar | None, values: NDArray[np.float64], ids: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        out = penalised_ahead([self.penalties], [()], values, ids)
        return out if grammar is None else np.where(grammar.allowed()[ids], out, -np.inf)

    def _choose_dense(self, raw: NDArray[np.float32], position: int, grammar: Grammar | None) -> int:
        logits: NDArray[np.floating] = raw if self.penalties.is_neutral else self.penalties.applied(raw)
        if grammar is not None:
            logits = np.where(grammar.allowed(), logits, -np.inf)
        best = int(logits.argmax())
        _require_finite(logits[best])
        rule = self.rule
        if not rule.temperature:
            return best
        keys = np.array([position_key(rule.seed_key, position)], np.uint64)
        if rule.top_k:
            chosen = top_indices(logits, rule.top_k)
            return race(logits[chosen].astype(np.float64), chosen, keys, rule)
        if rule.top_p < 1.0:
            return _choose_nucleus(logits, logits[best], keys, rule)
        return _choose_anywhere(logits, logits[best], keys, rule)


def _choose_anywhere(logits: NDArray[np.floating], best: np.floating, keys: NDArray[np.uint64], rule: Rule) -> int:
    """A race of the whole vocabulary. The most probable tokens run first; of the others, only those whose noise could
    lift the best of them past the leader.
    """

    def run(ids: NDArray[np.int64]) -> NDArray[np.float64]:
        score = (logits[ids].astype(np.float64) - float(best)) / rule.temperature + gumbel(keys, ids)
        score[logits[ids] < best + floor] = -np.inf
        return score

    floor = max(rule.log_min_p, MIN_GUMBEL - MAX_GUMBEL) * rule.temperature
    first = top_indices(logits, NUM_CANDIDATES)
    lead = run(first).max() - (float(logits[first[-1]]) - float(best)) / rule.temperature
    lucky = lucky_tokens(keys, logits.size, math.exp(-math.exp(-lead)) - _U_SLACK)
    chosen = np.union1d(first, lucky)
    return int(chosen[run(chosen).argmax()])


def _choose_nucleus(logits: NDArray[np.floating], best: np.floating, keys: NDArray[np.uint64], rule: Rule) -> int:
    """top_p over the whole vocabulary: only as many logits are sorted as the prefix needs, and the sum over all is
    taken in float64 only where float32 leaves the cut open.
    """
    z = logits - best
    z /= logits.dtype.type(rule.temperature)
    total, slack = float(np.exp(z, out=z).sum(dtype=np.float64)), _SUM_SLACK
    for num in (*_SORTED, logits.size):
        chosen = top_indices(logits, num)
        values = logits[chosen].astype(np.float64)
        reached = np.exp((values - values[0]) / rule.temperature).cumsum()
        least, most = reached.searchsorted([rule.top_p * total * (1.0 + e) for e in (-slack, slack)])
        if least != most:
            wide = (logits.astype(np.float64) - float(best)) / rule.temperature
            total, slack = float(np.exp(wide).sum()), 0.0
            most = reached.searchsorted(rule.top_p * total)
        if most < chosen.size:
            break
    return race(values, chosen, keys, rule, total)


def draw_ahead(
    samplers: Sequence[RowSampler], positions: Sequence[int], drafts: Sequence[Sequence[int]], block: Candidates
) -> list[list[int] | None]:
    """The tokens of each row at N positions from its own on, each as `draw` gives it when the drafts before it were
    accepted; block [B, N, K]. None for a row that must draw one by one: it has a grammar, its scores are not numbers,
    or its candidates do not decide.
    """
    rows = [row for row, sampler in enumerate(samplers) if sampler.draws_ahead]
    if len(rows) < len(samplers):
        block = Candidates(block.values[rows], block.ids[rows], block.log_sum_exp[rows])
    edited = [
        (i, samplers[row].penalties, drafts[row])
        for i, row in enumerate(rows)
        if not samplers[row].penalties.is_neutral
    ]
    edits = None
    if edited:
        indices, penalties, before = zip(*edited, strict=True)
        edits = Edits(list(indices), partial(penalised_ahead, penalties, before))
    drawn: list[list[int] | None] = [None] * len(samplers)
    if rows:
        found = draw_block([samplers[row].rule for row in rows], block, [positions[row] for row in rows], edits)
        for row, tokens in zip(rows, found, strict=True):
            drawn[row] = tokens
    return drawn


def _may_be_narrow(params: SamplingParams) -> bool:
    """Whether candidates can ever decide a draw; see race.py."""
    if params.temperature == 0.0 or 0 < params.top_k <= NUM_CANDIDATES:
        return True
    if params.top_k:
        return False
    return params.temperature <= 1.0 if params.top_p < 1.0 else params.min_p > 0.0


def _listed_logprobs(token_ids: Sequence[int], scores: Candidates, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of listed tokens; scores [N, K], N at least the number of tokens."""
    num = len(token_ids)
    sums = scores.log_sum_exp[:num].astype(np.float64)
    at = (scores.ids[:num] == np.array(token_ids, scores.ids.dtype)[:, None]).argmax(axis=1)
    own = (scores.values[np.arange(num), at] - sums).tolist()
    tops = zip(
        scores.ids[:num, :num_top].tolist(), (scores.values[:num, :num_top] - sums[:, None]).tolist(), strict=True
    )
    return tuple(
        [
            TokenLogprobs(logprob, tuple(zip(top_ids, top_values, strict=True)))
            for logprob, (top_ids, top_values) in zip(own, tops, strict=True)
        ]
    )


def _logprobs(token_id: int, scores: Scores, num_top: int) -> TokenLogprobs:
    if isinstance(scores, CandidateScores):
        listed = scores.ids.tolist()
        if token_id in listed and num_top <= len(listed):
            block = Candidates(scores.values[None], scores.ids[None], np.array([scores.log_sum_exp]))
            return _listed_logprobs((token_id,), block, num_top)[0]
        if scores.read_dense is None:
            raise ValueError("the log-probabilities asked for are not among the candidates")
        logits, total = scores.read_dense().logits, scores.log_sum_exp
    else:
        logits, total = scores.logits, log_sum_exp(scores.logits)
    best = top_indices(logits, num_top) if num_top else np.empty(0, np.int64)
    top = zip(best.tolist(), logits[best].tolist(), strict=True)
    return TokenLogprobs(float(logits[token_id]) - total, tuple([(i, v - total) for i, v in top]))


def _require_finite(best: np.floating) -> None:
    if not np.isfinite(best):
        raise RowError(f"the model's scores are not numbers: the largest is {best}")
