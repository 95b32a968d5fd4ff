"""What a row's own past does to its logits: repetition, frequency and presence penalties, and the fixed logit bias.

In the order of application, for a token v seen c(v) times in the output:

    repetition  r over prompt and output:  l > 0: l / r, else l * r      (CTRL, Keskar et al. 2019)
    frequency   f over the output:         l - f * c(v)                  (as the OpenAI API defines them)
    presence    p over the output:         l - p if c(v) > 0
    bias        b:                         l + b(v)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.api import SamplingParams


class Penalties:
    """The counts of one row. Owned by its sampler; `count` is the only thing that changes it."""

    __slots__ = ("_bias", "_bias_ids", "_counts", "_is_seen", "_params")

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._bias = np.array([params.logit_bias[token_id] for token_id in self._bias_ids.tolist()], np.float64)
        # By token id, up to the largest that was seen and one more, which stands for all behind it.
        self._counts = np.zeros(1, np.int32)
        self._is_seen = np.zeros(1, np.bool_)
        if params.repetition_penalty != 1.0 and prompt_token_ids:
            self._reach(max(prompt_token_ids))
            self._is_seen[list(prompt_token_ids)] = True

    @property
    def depend_on_output(self) -> bool:
        """Whether a committed token changes the next distribution."""
        p = self._params
        return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0

    @property
    def is_neutral(self) -> bool:
        return not self.depend_on_output and self._bias_ids.size == 0

    @property
    def only_lower(self) -> bool:
        """Whether no logit can ever rise."""
        p = self._params
        lowers = p.repetition_penalty >= 1.0 and p.frequency_penalty >= 0.0 and p.presence_penalty >= 0.0
        return lowers and not (self._bias > 0).any()

    def count(self, token_id: int) -> None:
        self._reach(token_id)
        self._counts[token_id] += 1
        self._is_seen[token_id] = True

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """A float64 copy of logits [V] with penalties and bias."""
        out = logits.astype(np.float64)
        ids = np.flatnonzero(self._is_seen)
        out[ids] = self._penalised(out[ids], self._counts[ids], self._is_seen[ids])
        out[self._bias_ids] += self._bias
        return out

    def applied_ahead(
        self, values: NDArray[np.float64], ids: NDArray[np.integer], drafts: Sequence[int]
    ) -> NDArray[np.float64]:
        """The values [N, K] of consecutive positions with penalties and bias. Position i counts the first i drafts as
        output: it matters only when they were accepted.
        """
        at = np.minimum(ids, self._counts.size - 1)
        counts, is_seen = self._counts[at], self._is_seen[at]
        for i, draft in enumerate(drafts, 1):
            drafted = ids[i:] == draft
            counts[i:] += drafted
            is_seen[i:] |= drafted
        out = self._penalised(values, counts, is_seen)
        if self._bias_ids.size:
            at = np.minimum(self._bias_ids.searchsorted(ids), self._bias_ids.size - 1)
            out = np.where(self._bias_ids[at] == ids, out + self._bias[at], out)
        return out

    def _penalised(
        self, values: NDArray[np.float64], counts: NDArray[np.int32], is_seen: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        p = self._params
        out = values
        if p.repetition_penalty != 1.0:
            repeated = np.where(out > 0, out / p.repetition_penalty, out * p.repetition_penalty)
            out = np.where(is_seen, repeated, out)
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
            out = np.where(counts > 0, out - (p.frequency_penalty * counts + p.presence_penalty), out)
        return out

    def _reach(self, token_id: int) -> None:
        """Room for this id and the one more."""
        missing = token_id + 2 - self._counts.size
        if missing > 0:
            missing = max(missing, self._counts.size)  # doubling: rows meet larger ids over and over
            self._counts = np.concatenate((self._counts, np.zeros(missing, np.int32)))
            self._is_seen = np.concatenate((self._is_seen, np.zeros(missing, np.bool_)))
