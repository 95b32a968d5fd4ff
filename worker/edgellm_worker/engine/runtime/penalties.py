"""What a row's own past does to its logits: repetition, frequency and presence penalties, and the fixed logit bias.

In the order of application, for a token v seen c(v) times in the output:

    repetition  r over prompt and output:  l > 0: l / r, else l * r      (CTRL, Keskar et al. 2019)
    frequency   f over the output:         l - f * c(v)                  (as the OpenAI API defines them)
    presence    p over the output:         l - p if c(v) > 0
    bias        b:                         l + b(v)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.api import SamplingParams

_Weight = float | NDArray[np.float64]


class Penalties:
    """The counts of one row. Owned by its sampler; `count` is the only thing that changes it."""

    __slots__ = ("_bias", "_bias_ids", "_marks", "_params", "depend_on_output", "is_neutral", "only_lower")

    depend_on_output: Final[bool]
    """Whether a committed token changes the next distribution."""
    is_neutral: Final[bool]
    only_lower: Final[bool]
    """Whether no logit can ever rise."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = p = params
        self._bias_ids = np.array(sorted(p.logit_bias), np.int64)
        self._bias = np.array([p.logit_bias[token_id] for token_id in self._bias_ids.tolist()], np.float64)
        self.depend_on_output = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
        self.is_neutral = not self.depend_on_output and self._bias_ids.size == 0
        lowers = p.repetition_penalty >= 1.0 and p.frequency_penalty >= 0.0 and p.presence_penalty >= 0.0
        self.only_lower = lowers and not (self._bias > 0).any()
        # By token id, twice the count in the output and one if it is in the prompt; up to the largest id that was met
        # and one more, which stands for all behind it.
        self._marks = np.zeros(1, np.int32)
        if p.repetition_penalty != 1.0 and prompt_token_ids:
            self._reach(max(prompt_token_ids))
            self._marks[list(prompt_token_ids)] = 1

    def count(self, token_id: int) -> None:
        self._reach(token_id)
        self._marks[token_id] += 2

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """A float64 copy of logits [V] with penalties and bias."""
        out = logits.astype(np.float64)
        ids = np.flatnonzero(self._marks)
        p = self._params
        out[ids] = _penalised(out[ids], self._marks[ids], p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        out[self._bias_ids] += self._bias
        return out

    def look_up(self, ids: NDArray[np.integer], marks: NDArray[np.int32]) -> None:
        """Write the marks of these tokens."""
        self._marks.take(ids, mode="clip", out=marks)

    @property
    def has_bias(self) -> bool:
        return self._bias_ids.size > 0

    @property
    def weights(self) -> tuple[float, float, float]:
        """Repetition, frequency, presence."""
        return self._params.repetition_penalty, self._params.frequency_penalty, self._params.presence_penalty

    def biased(self, values: NDArray[np.float64], ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """The values of these tokens with the bias."""
        at = np.minimum(self._bias_ids.searchsorted(ids), self._bias_ids.size - 1)
        return np.where(self._bias_ids[at] == ids, values + self._bias[at], values)

    def _reach(self, token_id: int) -> None:
        """Room for this id and the one more."""
        missing = token_id + 2 - self._marks.size
        if missing > 0:  # at least doubling: rows meet larger ids over and over
            self._marks = np.concatenate((self._marks, np.zeros(max(missing, self._marks.size), np.int32)))


def penalised_ahead(
    rows: Sequence[Penalties], drafts: Sequence[Sequence[int]], values: NDArray[np.float64], ids: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Values [R, N, K] of tokens at consecutive positions, with each row's penalties and bias.

    Position i counts the row's first i drafts as output: it matters only when they were accepted.
    """
    marks = np.empty(ids.shape, np.int32)
    for index, row in enumerate(rows):
        row.look_up(ids[index], marks[index])
    for i, draft in enumerate(np.array(drafts, ids.dtype).T, 1):
        is_drafted = ids[:, i:] == draft[:, None, None]
        if is_drafted.any():
            marks[:, i:][is_drafted] += 2
    out = values.copy()
    marked = np.nonzero(marks)  # few: most candidates are new to the text
    weights = np.array([row.weights for row in rows])[marked[0]]
    out[marked] = _penalised(out[marked], marks[marked], *weights.T)
    for index, row in enumerate(rows):
        if row.has_bias:
            out[index] = row.biased(out[index], ids[index])
    return out


def _penalised(
    values: NDArray[np.float64], marks: NDArray[np.int32], repetition: _Weight, frequency: _Weight, presence: _Weight
) -> NDArray[np.float64]:
    """Of tokens that were seen, in prompt or output."""
    repeated = np.where(values > 0, values / repetition, values * repetition)
    counts = marks >> 1
    return np.where(counts > 0, repeated - (frequency * counts + presence), repeated)
