"""In which form a checkpoint's weights run: as they are, or decoded to float16 where the library or GPU cannot."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.trt import Library, Target

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """Which quantized forms a library and target run as they are; others are decoded to float16 when read."""

    runs_fp8: bool
    runs_fp4: bool

    @classmethod
    def of(cls, library: Library, target: Target) -> WeightPolicy:
        return cls(library.supports(target, fp8=True), library.supports(target, fp8=True, fp4=True))

    def runs(self, weight: Weight) -> bool:
        match weight:
            case Fp8Weight():
                return self.runs_fp8
            case Nvfp4Weight():
                return self.runs_fp4
            case _:
                return True


class WeightReader:
    """Applies the policy, once per weight: the decoded copy is kept, so that equal weights stay one object."""

    def __init__(self, policy: WeightPolicy) -> None:
        self._policy = policy
        self._decoded: dict[int, tuple[Weight, DenseWeight]] = {}

    @property
    def num_decoded(self) -> int:
        return len(self._decoded)

    def __call__(self, weight: Weight) -> Weight:
        if self._policy.runs(weight):
            return weight
        if id(weight) not in self._decoded:
            if not self._decoded:
                _log.warning(
                    "%s weights are decoded to float16: this GPU or library cannot run them", type(weight).__name__
                )
            self._decoded[id(weight)] = (weight, DenseWeight(decode(weight).astype(np.float16)))
        return self._decoded[id(weight)][1]
