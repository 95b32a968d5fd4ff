"""The model's weights on the device: one resident copy, in the layouts that networks and kernels take as inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.build.segments import WeightGroup
from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import Array, DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.packed_weights import factor, pack_data, pack_scales

Maker = Callable[[], Array]


@dataclass(frozen=True, slots=True)
class PackedPointers:
    data: int
    scales: int
    factor: float


class WeightStore:
    """Uploads on first use; equal data (tied embeddings) is one copy."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pointers: dict[tuple[object, ...], int] = {}
        self._kept: list[Weight] = []  # keys hold addresses: the arrays must outlive them
        self.num_bytes = 0

    def table(self, weight: Weight) -> int:
        """float16 [V, D]."""
        return self._once(("half", weight), (weight,), lambda: _half((weight,)))

    def vector(self, group: WeightGroup) -> int:
        """float32, flattened."""
        key = ("vector", *group.weights)
        return self._once(
            key, group.weights, lambda: np.concatenate([decode(weight).ravel() for weight in group.weights])
        )

    def packed(self, weight: Weight) -> PackedPointers:
        """As kernels/packed.cu reads it."""
        data = self._once(("packed", weight), (weight,), lambda: pack_data(weight))
        scales = self._once(("packed scales", weight), (weight,), lambda: pack_scales(weight))
        return PackedPointers(data, scales, factor(weight))

    def inputs(self, group: WeightGroup) -> dict[str, int]:
        """Network input name suffix -> device pointer."""
        if not group.is_matrix:
            return {"": self.vector(group)}
        first = group.weights[0]
        match first:
            case DenseWeight():
                key = ("half", *group.weights)
                return {"": self._once(key, group.weights, lambda: _half(group.weights))}
            case Fp8Weight():
                return self._fp8(first)
            case Nvfp4Weight():
                return self._nvfp4(first)

    def _fp8(self, weight: Fp8Weight) -> dict[str, int]:
        pointers = {
            "": self._once(("raw", weight), (weight,), lambda: weight.data.view(np.uint8)),
            ".scale": self._once(("scale", weight), (weight,), lambda: np.array([weight.scale], np.float32)),
        }
        if weight.input_scale is not None:
            scale = np.array([weight.input_scale], np.float32)
            pointers[".input_scale"] = self._once(("input_scale", weight), (weight,), lambda: scale)
        return pointers

    def _nvfp4(self, weight: Nvfp4Weight) -> dict[str, int]:
        scale = np.array([weight.global_scale], np.float32)
        return {
            "": self._once(("raw", weight), (weight,), lambda: weight.data),
            ".block_scale": self._once(("block", weight), (weight,), lambda: weight.block_scale.view(np.uint8)),
            ".global_scale": self._once(("scale", weight), (weight,), lambda: scale),
        }

    def _once(self, key: tuple[object, ...], weights: tuple[Weight, ...], make: Maker) -> int:
        address = tuple(_address(part) if isinstance(part, Weight) else part for part in key)
        if address not in self._pointers:
            array = make()
            self._pointers[address] = self._cuda.upload(array)
            self._kept.extend(weights)
            self.num_bytes += array.nbytes
        return self._pointers[address]


def _half(weights: tuple[Weight, ...]) -> Array:
    parts = [decode(weight).astype(np.float16) if not _is_half(weight) else weight.data for weight in weights]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _is_half(weight: Weight) -> bool:
    return isinstance(weight, DenseWeight) and weight.data.dtype == np.float16


def _address(weight: Weight) -> tuple[int, tuple[int, ...], str]:
    return weight.data.ctypes.data, weight.shape, str(weight.data.dtype)
