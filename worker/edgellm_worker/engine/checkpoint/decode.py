"""Quantized weights as float32, bit for bit what ModelOpt's own dequantization gives.

NVFP4: the two scales are multiplied first, in float32, then the element: `e2m1 * (block_scale * global_scale)`. The
other order differs in the last bit: e2m1 has one mantissa bit, e4m3 three, so it is the global scale's products that
round.

Speed. A byte holds two elements: one look-up gives both as one 8-byte item, at half the look-ups and without taking
nibbles apart. It goes in chunks whose indices and values stay in the second-level cache, where the block scales are
multiplied in.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from edgellm_worker.engine.checkpoint.forms import BLOCK
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight

Float32Array = npt.NDArray[np.float32]

# The sixteen E2M1 codes: bit 3 is the sign, then two exponent bits and one mantissa bit. Code 8, minus zero, is plain
# zero as in ModelOpt's table.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# [256]: both values of a packed byte as one item, even input index (low nibble) first.
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1).view(np.uint64).reshape(-1)

# [256]: the value of every E4M3 code.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

_BYTES_PER_BLOCK = BLOCK // 2
_CHUNK_BLOCKS = 1 << 13


def decode(weight: Weight) -> Float32Array:
    """The weight's values, float32, in its logical shape."""
    if isinstance(weight, DenseWeight):
        return weight.data.astype(np.float32)
    if isinstance(weight, Fp8Weight):
        return decode_fp8(weight)
    return decode_nvfp4(weight)


def decode_fp8(weight: Fp8Weight) -> Float32Array:
    """e4m3 * scale, in float32."""
    table: Float32Array = _E4M3 * weight.scale
    values: Float32Array = table[weight.data.view(np.uint8)]
    return values


def decode_nvfp4(weight: Nvfp4Weight) -> Float32Array:
    """e2m1 * (block_scale * global_scale), in float32, [out, in]."""
    packed = np.ascontiguousarray(weight.data).reshape(-1, _BYTES_PER_BLOCK)
    codes = np.ascontiguousarray(weight.block_scale).view(np.uint8).reshape(-1, 1)
    products: Float32Array = _E4M3 * weight.global_scale
    values = np.empty((len(packed), BLOCK), np.float32)
    pairs = values.view(np.uint64)
    for start in range(0, len(packed), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        np.take(_PAIRS, packed[part], out=pairs[part], mode="clip")
        values[part] *= products[codes[part]]
    return values.reshape(weight.shape)
