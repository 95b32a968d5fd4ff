"""What a model says about the next token, as samplers take it.

One position comes in two forms that give the same token: all logits, or the best candidates with the log-sum-exp of
all. A verify pass gives N positions for each of B rows at once, as arrays, so that a step of plain rows makes no object
for a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_CANDIDATES: Final = 64
"""How many candidates per position an engine hands over: enough for every top_k up to it and for top_logprobs."""

_GROUP: Final = 256

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class DenseScores:
    """All logits of one position: float32 [V]."""

    logits: Logits


@dataclass(frozen=True, slots=True, eq=False)
class CandidateScores:
    """The min(NUM_CANDIDATES, V) or more best logits of one position, falling, equal ones by rising id: [K] and [K].

    `log_sum_exp` is over the whole vocabulary. `read_dense` fetches all logits, for draws that the candidates cannot
    decide; None where they cannot be had.
    """

    values: Logits
    ids: NDArray[np.integer]
    log_sum_exp: float
    read_dense: Callable[[], DenseScores] | None = None


Scores = DenseScores | CandidateScores


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidates of many positions, each as in `CandidateScores`: values and ids [.., K], log_sum_exp [..]."""

    values: Logits
    ids: NDArray[np.integer]
    log_sum_exp: NDArray[np.floating]

    def row(self, row: int) -> Candidates:
        return Candidates(self.values[row], self.ids[row], self.log_sum_exp[row])


@dataclass(frozen=True, slots=True, eq=False)
class RoundScores:
    """The scores of N positions of B rows.

    num_positions  N
    candidates     [B, N, K], the caller's own; None when all logits are at hand anyway
    read_logits    (row, position) -> float32 [V]; may be asked until the executor is given its next work
    """

    num_positions: int
    candidates: Candidates | None
    read_logits: Callable[[int, int], Logits]

    def row(self, row: int) -> list[Scores]:
        """One row's positions, one by one. The logits behind candidates are read when they are needed, once."""

        @cache
        def dense(position: int) -> DenseScores:
            return DenseScores(self.read_logits(row, position))

        if self.candidates is None:
            return [dense(i) for i in range(self.num_positions)]
        found = self.candidates.row(row)
        sums = found.log_sum_exp.tolist()
        return [CandidateScores(found.values[i], found.ids[i], sums[i], partial(dense, i)) for i in range(len(sums))]


def top_indices(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Indices of the k largest of values [V], falling, equal ones by rising index."""
    if k < values.size:
        pool = _pool(values, k)
        if pool is not None:
            return pool[top_indices(values[pool], k)]
        threshold = np.partition(values, values.size - k)[values.size - k]
        above = np.flatnonzero(values > threshold)
        level = np.flatnonzero(values == threshold)[: k - above.size]
        chosen = np.sort(np.concatenate((above, level)))
    else:
        chosen = np.arange(values.size)
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _pool(values: NDArray[np.floating], k: int) -> NDArray[np.int64] | None:
    """Indices, rising, of some of values [V] with the k largest among them; None where that would not pay.

    k groups whose largest value reaches t have k values that do, so the k largest all reach t. A group takes its values
    from all over the vocabulary: likely tokens are often neighbours.
    """
    num_groups = values.size // _GROUP
    if num_groups < 2 * k:
        return None
    largest = values[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
    pool = np.flatnonzero(values >= np.partition(largest, num_groups - k)[num_groups - k])
    return pool if k <= pool.size < values.size // 2 else None


def log_sum_exp(logits: NDArray[np.floating]) -> float:
    """The log-sum-exp of logits [V]: exponentials in their type, summed in float64."""
    top = logits.max()
    weights = logits - top
    return float(top) + math.log(float(np.exp(weights, out=weights).sum(dtype=np.float64)))
