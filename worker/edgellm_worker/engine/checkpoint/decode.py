"""Quantized weights as float32, bit for bit what ModelOpt's own dequantization gives.

NVFP4: the two scales are multiplied first, in float32, then the element: `e2m1 * (block_scale * global_scale)`. The
other order differs in the last bit: e2m1 has one mantissa bit, e4m3 three, so it is the global scale's products that
round.

Speed. A byte holds two elements, and a block scale covers eight bytes. One table of 65 536 entries, indexed by (scale
code, packed byte), gives the two finished products as one 8-byte item: one lookup a byte, no arithmetic. The table
costs about a millisecond, so small tensors use the 256-entry table of element pairs and a multiplication instead.
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

# [256, 2]: the values of a packed byte, even input index (low nibble) first.
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)

# [256]: the value of every E4M3 code.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

_BYTES_PER_BLOCK = BLOCK // 2
_TABLE_PAYS_FROM_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 16  # packed bytes at a time: indices and output stay in the second-level cache


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
    data = np.ascontiguousarray(weight.data)
    scales = np.ascontiguousarray(weight.block_scale).view(np.uint8)
    products = _E4M3 * weight.global_scale
    if data.size < _TABLE_PAYS_FROM_BYTES:
        blocks: Float32Array = _PAIRS[data].reshape(-1, BLOCK) * products[scales].reshape(-1, 1)
        return blocks.reshape(weight.shape)
    table = (_PAIRS[None] * products[:, None, None]).reshape(-1, 2).view(np.uint64).reshape(-1)
    return _by_table(table, data, scales).reshape(weight.shape)


def _by_table(
    table: npt.NDArray[np.uint64], data: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> Float32Array:
    """Finished pairs by (scale code, packed byte), chunk by chunk."""
    packed = data.reshape(-1, _BYTES_PER_BLOCK)
    codes = scales.reshape(-1)
    out = np.empty(packed.shape, np.uint64)
    rows = _CHUNK_BYTES // _BYTES_PER_BLOCK
    index = np.empty((rows, _BYTES_PER_BLOCK), np.intp)
    for start in range(0, len(packed), rows):
        stop = min(start + rows, len(packed))
        part = index[: stop - start]
        np.multiply(codes[start:stop, None], 256, out=part, dtype=np.intp)
        np.add(part, packed[start:stop], out=part)
        np.take(table, part, out=out[start:stop], mode="clip")
    return out.view(np.float32)
