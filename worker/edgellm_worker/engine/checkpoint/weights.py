"""The typed weights that a checkpoint hands to the ops.

Arrays are read-only views into the mapped files: nothing is decoded until an op needs it. numpy decodes; TensorRT
emits its own quantized layers from the same fields. Low-bit arrays carry ml_dtypes element types or raw bytes as said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """`data` [out, in] (or any shape for norms, conv, embeddings): float32, float16 or ml_dtypes.bfloat16."""

    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """w = e4m3(data) * scale. `data` [out, in] ml_dtypes.float8_e4m3fn; `scale` float32 scalar, never rounded.
    `input_scale` is the activation's static scale, or None (weight-only).
    """

    data: Array
    scale: np.float32
    input_scale: np.float32 | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """w = e2m1 * block_scale * global_scale.

    data          uint8 [out, in/2]; the low nibble is the even input index
    block_scale   ml_dtypes.float8_e4m3fn [out, in/16]
    global_scale  float32 scalar, as a multiplier (reciprocals of compressed-tensors are inverted when read)
    input_scale   float32 scalar multiplier, or None (W4A16)
    """

    data: Array
    block_scale: Array
    global_scale: np.float32
    input_scale: np.float32 | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data.shape[0], self.data.shape[1] * 2)


Weight = DenseWeight | Fp8Weight | Nvfp4Weight


@dataclass(frozen=True, slots=True)
class KvScales:
    """FP8 KV cache scales of one attention layer: value = e4m3 * scale. 1.0 where the checkpoint has none."""

    k_scale: np.float32
    v_scale: np.float32
