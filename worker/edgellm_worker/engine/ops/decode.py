"""Weights as float32 arrays: what a backend that does its own arithmetic makes of what the checkpoint holds.

DenseWeight   the values themselves
Fp8Weight     e4m3 * scale
Nvfp4Weight   e2m1 * block_scale * global_scale; E2M1 is sign, two exponent bits, one mantissa bit, and sixteen
              consecutive inputs of one output share a block scale
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each four-bit code."""

_BLOCK: Final = 16


def float32(weight: Weight) -> NDArray[np.float32]:
    """The weight's values, in its logical shape."""
    match weight:
        case DenseWeight():
            return weight.data.astype(np.float32)
        case Fp8Weight():
            return weight.data.astype(np.float32) * weight.scale
        case Nvfp4Weight():
            return _nvfp4(weight)


def _nvfp4(weight: Nvfp4Weight) -> NDArray[np.float32]:
    num_out, num_in = weight.shape
    values = np.empty((num_out, num_in), np.float32)
    values[:, 0::2] = E2M1[weight.data & 0xF]
    values[:, 1::2] = E2M1[weight.data >> 4]
    scale = weight.block_scale.astype(np.float32) * weight.global_scale
    blocks = values.reshape(num_out, num_in // _BLOCK, _BLOCK) * scale[:, :, None]
    return blocks.reshape(num_out, num_in)
