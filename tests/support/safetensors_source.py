"""A model's weights straight from one safetensors file: no namespaces to resolve, no quantization."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from edgellm_worker.engine.checkpoint.weights import DenseWeight, KvScales
from edgellm_worker.engine.errors import CheckpointError


class SafetensorsSource:
    """`WeightSource` over the tensors below one prefix; `lm_head` is found outside of it."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._tensors = load_file(path)
        self._prefix = prefix

    def weight(self, name: str) -> DenseWeight:
        return self.array(f"{name}.weight")

    def array(self, name: str) -> DenseWeight:
        if not self.has(name):
            raise CheckpointError([f"{self._prefix}{name}: missing"])
        return DenseWeight(self._tensors[self._full(name)])

    def has(self, name: str) -> bool:
        return self._full(name) in self._tensors

    def kv_scales(self, layer: int) -> KvScales:
        return KvScales(np.float32(1), np.float32(1))

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else f"{self._prefix}{name}"
