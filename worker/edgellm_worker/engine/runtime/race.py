"""Races: many tokens drawn at once from the best candidates of their positions, where that is exact.

A token wins its position's race with the largest `z + G`, z = (value - best value) / T, among those that the filters
keep (sampling.py). The arrays are [B, N, K]: rows, positions of a row, candidates falling by value. What a row draws by
is a column over the last two axes; nothing of one position touches another's, so a race of many gives what each would
give alone.

Values may be edited first, by penalties and constraints; edits here only ever lower a value. With `last` the raw value
of the last candidate, a token that is not listed is at most `last`, before and after. So the listed tokens above `last`
are the best of the whole vocabulary, in order: with top_k of them (one, for a greedy row) nothing else counts.

Without top_k, min_p leaves only listed tokens when one at `last` would fail it; and top_p cuts where the running sum of
exp(z) reaches top_p of the whole sum, which is that of the listed and a tail. The log-sum-exp gives the tail at T = 1;
at T < 1, (l - m) / T = (l - m) + (l - m)(1/T - 1) and l <= last give, m being the best value,

    0 <= tail_T <= tail_1 * exp((last - m)(1/T - 1))

which is next to nothing as soon as `last` is well below m. Where the least and the largest whole sum cut at the same
token, so does the true one. What cannot be decided is left to whoever has all logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.runtime.noise import gumbel, position_keys
from edgellm_worker.engine.runtime.scores import Candidates

Real = NDArray[np.float64]
Ids = NDArray[np.integer]
_Item = TypeVar("_Item", bound=np.generic)

_SUM_SLACK: Final = 1e-4
"""What a log-sum-exp (float32, sums in another order) may be off by, as a share of the sum."""
_MIN_P_SLACK: Final = 1e-5
"""How near min_p's boundary a token is left to the one rule that looks at all logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What a row draws by. Off is: temperature 0 (greedy), top_k 0, top_p infinite, log_min_p -infinite."""

    temperature: float
    top_k: int
    top_p: float
    log_min_p: float
    seed_key: int


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """What penalties and constraints do to some rows: (values, ids), both [E, N, K] -> values, none of them larger."""

    rows: list[int]
    apply: Callable[[Real, Ids], Real]


@dataclass(frozen=True, slots=True, eq=False)
class _Listed:
    """Candidates in the order of their edited values. The first `num_sure` [B, N] are the best of the vocabulary."""

    values: NDArray[np.floating]
    ids: Ids
    num_sure: NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class _Racers:
    """Some rows of a block. z, score and ids [R, N, K], already cut to top_k; the rest are columns [R, 1, 1]."""

    z: Real
    score: Real
    ids: Ids
    temperature: Real
    top_p: Real
    log_min_p: Real


def race(values: Real, ids: Ids, keys: NDArray[np.uint64], rule: Rule, total: float | None = None) -> int:
    """One position's winner: values and ids [K], falling by value and cut to top_k; keys [1].

    `total` is the sum of exp(z) over everything that top_p counts, where that is more than is listed.
    """
    z = (values - values[0]) / rule.temperature
    score = z + gumbel(keys, ids)
    if rule.top_p < 1.0:
        reached = np.exp(z).cumsum()
        score[1:][reached[:-1] >= rule.top_p * (reached[-1] if total is None else total)] = -np.inf
    score[z < rule.log_min_p] = -np.inf
    return int(ids[score.argmax()])


def draw_block(
    rules: Sequence[Rule], block: Candidates, positions: Sequence[int], edits: Edits | None = None
) -> list[list[int] | None]:
    """Each row's own tokens at N positions from `positions[row]` on; block [B, N, K].

    None for a row of which a token cannot be decided here, or whose scores are not numbers.
    """
    listed = None if edits is None else _edited(block, edits)
    values, ids = (block.values, block.ids) if listed is None else (listed.values, listed.ids)
    drawn: list[list[int] | None] = ids[:, :, 0].tolist()
    is_number = np.isfinite(block.values[:, :, 0]).min(axis=1).tolist()
    num_sure = [ids.shape[2]] * len(rules) if listed is None else [min(counts) for counts in listed.num_sure.tolist()]
    counted: list[int] = []
    uncounted: list[int] = []
    for row, rule in enumerate(rules):
        needed = min(rule.top_k, ids.shape[2]) if rule.temperature and rule.top_k else 1
        if not is_number[row] or num_sure[row] < needed:
            drawn[row] = None
        elif rule.temperature:
            (counted if rule.top_k else uncounted).append(row)
    if counted:
        racers = _line_up(counted, rules, values, ids, positions)
        for row, tokens in zip(counted, _winners(racers, None), strict=True):
            drawn[row] = tokens
    if uncounted:
        racers = _line_up(uncounted, rules, values, ids, positions)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities make sums that decide nothing
            whole, is_decided = _whole_sums(racers, uncounted, block, listed)
        for row, tokens, good in zip(uncounted, _winners(racers, whole), is_decided, strict=True):
            drawn[row] = tokens if good else None
    return drawn


def _edited(block: Candidates, edits: Edits) -> _Listed:
    values, ids = block.values.astype(np.float64), block.ids.copy()
    num_sure = np.full(ids.shape[:2], ids.shape[2])
    raw, unsorted = values[edits.rows], ids[edits.rows]
    edited = edits.apply(raw, unsorted)
    order = np.argsort(-edited, axis=-1)
    falling = _taken(edited, order)
    if (falling[:, :, 1:] == falling[:, :, :-1]).any():  # equal values go by rising id
        order = np.lexsort((unsorted, -edited), axis=-1)
    num_sure[edits.rows] = np.count_nonzero(edited > raw[:, :, -1:], axis=-1)
    values[edits.rows], ids[edits.rows] = falling, _taken(unsorted, order)
    return _Listed(values, ids, num_sure)


def _taken(array: NDArray[_Item], order: NDArray[np.integer]) -> NDArray[_Item]:
    """`np.take_along_axis` over the last axis of [E, N, K], at a quarter of its price."""
    width = order.shape[-1]
    firsts = np.arange(0, order.size, width).reshape(*order.shape[:-1], 1)
    return array.ravel().take(order + firsts)


def _line_up(
    rows: list[int], rules: Sequence[Rule], values: NDArray[np.floating], ids: Ids, positions: Sequence[int]
) -> _Racers:
    racing = [rules[row] for row in rows]
    num_positions, num_listed = values.shape[1:]
    width = max([rule.top_k or num_listed for rule in racing])
    chosen = slice(None) if len(rows) == len(rules) else rows  # a slice is cheaper than a list of all
    z = values[chosen, :, :width].astype(np.float64)
    ids = ids[chosen, :, :width]
    columns = np.array([(r.temperature, r.top_p, r.log_min_p, r.top_k or width) for r in racing])[:, :, None, None]
    if min([rule.top_k or width for rule in racing]) < width:
        np.copyto(z, -np.inf, where=np.arange(width) >= columns[:, 3])
    z -= z[:, :, :1].copy()
    z /= columns[:, 0]
    seeds = np.array([[rule.seed_key] for rule in racing], np.uint64)
    absolute = np.array([[positions[row]] for row in rows]) + np.arange(num_positions)
    score = gumbel(position_keys(seeds, absolute)[:, :, None], ids)
    score += z
    return _Racers(z, score, ids, columns[:, 0], columns[:, 1], columns[:, 2])


def _winners(racers: _Racers, whole: Real | None) -> list[list[int]]:
    """`whole` [R, N, 1]: the sum that top_p is a share of, None where that is of the listed. Uses up `score`."""
    z, score = racers.z, racers.score
    if racers.top_p.min() < 1.0:
        reached = np.exp(z).cumsum(axis=-1)
        share = racers.top_p * (reached[:, :, -1:] if whole is None else whole)
        np.copyto(score[:, :, 1:], -np.inf, where=reached[:, :, :-1] >= share)
    if racers.log_min_p.max() > -np.inf:
        np.copyto(score, -np.inf, where=z < racers.log_min_p)
    num_rows, num_positions, width = score.shape
    best = score.reshape(-1, width).argmax(axis=-1)
    flat = racers.ids.reshape(-1, width)[np.arange(best.size), best]
    tokens: list[list[int]] = flat.reshape(num_rows, num_positions).tolist()
    return tokens


def _whole_sums(racers: _Racers, rows: list[int], block: Candidates, listed: _Listed | None) -> tuple[Real, list[bool]]:
    """For rows without top_k: a sum [R, N, 1] that cuts where the true one does, and whether it surely does [R]."""
    raw = block.values[rows].astype(np.float64)
    best = raw[:, :, :1] if listed is None else listed.values[rows, :, :1]
    last = np.minimum(raw[:, :, -1:] - best, 0.0)
    at_one = np.exp(block.log_sum_exp[rows][:, :, None] - best)
    tail = at_one - np.exp(raw - best).sum(axis=-1, keepdims=True)
    slack = _SUM_SLACK * at_one
    reached = np.exp(racers.z).cumsum(axis=-1)
    most = reached[:, :, -1:] + (np.maximum(tail, 0.0) + slack) * np.exp(last * (1.0 / racers.temperature - 1.0))
    is_known = (racers.temperature == 1.0) & (listed is None)
    least = reached[:, :, -1:] + np.where(is_known, np.maximum(tail - slack, 0.0), 0.0)
    cuts = [(reached < racers.top_p * whole).sum(axis=-1) for whole in (least, most)]
    num_sure = raw.shape[2] if listed is None else listed.num_sure[rows]
    by_top_p = (cuts[0] == cuts[1]) & (cuts[1] < num_sure)
    margin = np.abs(racers.z - racers.log_min_p).min(axis=-1) > _MIN_P_SLACK
    by_min_p = margin & (last / racers.temperature < racers.log_min_p - _MIN_P_SLACK)[:, :, 0]
    has_top_p = racers.top_p[:, :, 0] < math.inf
    decided: list[bool] = np.where(has_top_p, by_top_p, by_min_p).all(axis=1).tolist()
    return most, decided
