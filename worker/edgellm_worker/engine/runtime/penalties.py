"""What a row's own past does to its logits: repetition, frequency and presence penalties, and the fixed logit bias.

In the order of application, for a token v seen c(v) times in the output:

    repetition  r over prompt and output:  l > 0: l / r, else l * r      (CTRL, Keskar et al. 2019)
    frequency   f over the output:         l - f * c(v)                  (as the OpenAI API defines them)
    presence    p over the output:         l - p if c(v) > 0
    bias        b:                         l + b(v)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.api import SamplingParams


class Penalties:
    """The counts of one row. Owned by its sampler; `count` is the only thing that changes it."""

    __slots__ = ("_bias", "_bias_ids", "_counts", "_params", "_prompt_ids")

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = frozenset(prompt_token_ids) if params.repetition_penalty != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))

    @property
    def depend_on_output(self) -> bool:
        """Whether a committed token changes the next distribution."""
        p = self._params
        return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0

    @property
    def is_neutral(self) -> bool:
        return not self.depend_on_output and self._bias_ids.size == 0

    def count(self, token_id: int) -> None:
        self._counts[token_id] += 1

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """A float64 copy of logits [V] with penalties and bias."""
        out = logits.astype(np.float64)
        p = self._params
        if p.repetition_penalty != 1.0:
            seen = self._prompt_ids.union(self._counts)
            ids = np.fromiter(seen, np.int64, len(seen))
            values = out[ids]
            out[ids] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if p.frequency_penalty != 0.0 or p.presence_penalty != 0.0:
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            out[ids] -= p.frequency_penalty * counts + p.presence_penalty
        out[self._bias_ids] += self._bias
        return out
