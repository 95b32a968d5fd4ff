"""In which form a checkpoint's quantized weights run. Three ways, the first that can be had:

    native    in the library's networks, as they are
    packed    in a kernel of this package, at their own bytes (kernels/packed.cu)
    decoded   as float16, in the library's networks: two or four times the bytes

A weight-only NVFP4 matrix is packed even where the library has NVFP4: with weights as network inputs it decodes such a
matrix into scratch memory on each call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.runtime.packed_weights import can_pack
from edgellm_worker.engine.trt import Library, Target

_log = logging.getLogger(__name__)


class Running(StrEnum):
    NATIVE = "native"
    PACKED = "packed"
    DECODED = "decoded"


_NAMES: dict[type[Weight], str] = {Fp8Weight: "FP8", Nvfp4Weight: "NVFP4"}
_WORDS = {
    Running.NATIVE: "run as they are in the library's networks",
    Running.PACKED: "run as they are in a kernel of this package",
    Running.DECODED: "are decoded to float16",
}


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """`runs_fp8` and `runs_fp4`: the library and target run them natively. `packs`: what they do not stays packed."""

    runs_fp8: bool
    runs_fp4: bool
    packs: bool = False

    @classmethod
    def of(cls, library: Library, target: Target) -> WeightPolicy:
        return cls(library.supports(target, fp8=True), library.supports(target, fp8=True, fp4=True))

    def running(self, weight: Weight) -> Running:
        match weight:
            case DenseWeight():
                return Running.NATIVE
            case Fp8Weight():
                is_native, is_packed = self.runs_fp8, self.packs and not self.runs_fp8
            case Nvfp4Weight():
                is_weight_only = weight.input_scale is None
                is_native, is_packed = self.runs_fp4, self.packs and (is_weight_only or not self.runs_fp4)
        if is_packed and can_pack(weight):
            return Running.PACKED
        return Running.NATIVE if is_native else Running.DECODED

    def runs(self, weight: Weight) -> bool:
        return self.running(weight) is not Running.DECODED


class WeightReader:
    """Applies the policy, once per weight: the decoded copy is kept, so that equal weights stay one object. The log
    says once for each kind of weight how it runs.

    `has_values` False: decoded weights have shapes alone, to plan and to build from (54 GB less for a 27B).
    """

    def __init__(self, policy: WeightPolicy, *, has_values: bool = True) -> None:
        self._policy = policy
        self._has_values = has_values
        self._decoded: dict[int, tuple[Weight, DenseWeight]] = {}
        self._told: set[tuple[str, Running]] = set()

    @property
    def num_decoded(self) -> int:
        return len(self._decoded)

    def packs(self, weight: Weight) -> bool:
        return self._policy.running(weight) is Running.PACKED

    def __call__(self, weight: Weight) -> Weight:
        running = self._policy.running(weight)
        self._tell(weight, running)
        if running is not Running.DECODED:
            return weight
        if id(weight) not in self._decoded:
            self._decoded[id(weight)] = (weight, self._decode(weight))
        return self._decoded[id(weight)][1]

    def _decode(self, weight: Weight) -> DenseWeight:
        if self._has_values:
            return DenseWeight(decode(weight).astype(np.float16))
        return DenseWeight(np.broadcast_to(np.zeros((), np.float16), weight.shape))

    def _tell(self, weight: Weight, running: Running) -> None:
        name = _NAMES.get(type(weight))
        if name is None or (name, running) in self._told:
            return
        self._told.add((name, running))
        level = logging.WARNING if running is Running.DECODED else logging.INFO
        _log.log(level, "%s weights %s", name, _WORDS[running])
