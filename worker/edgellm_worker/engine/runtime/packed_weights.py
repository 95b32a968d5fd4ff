"""Quantized weights rearranged for the kernel that multiplies by them as they are (kernels/packed.cu): the checkpoint's
own bits in another order, with zeros up to whole tiles of 16 rows by 128 k.

    NVFP4   [row tile, k step, half, row of 8, 64 bytes]          128 k of a row are 64 bytes
            scales [row tile, k step, row of 8, quarter, half, 2]  a lane reads its four in one word
    FP8     [row tile, k step, half of k, half, row of 8, 64 bytes]

`half` is the rows 0 to 7 or 8 to 15 of a tile, `quarter` a lane's share of a step's k. Within each 32-bit word the bits
are moved so that the float16 of two neighbours come out of few operations: see `_NVFP4_BITS`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from edgellm_worker.engine.checkpoint.forms import BLOCK
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.errors import BuildError

Bytes = npt.NDArray[np.uint8]

TILE_ROWS = 16
STEP = 128  # k of one step
_HALF_ROWS = TILE_ROWS // 2
_ROW_BYTES = 64  # of one row in one kibibyte
_CHUNK_WORDS = 1 << 15

# Where bits 0 to 31 of a little-endian word go. NVFP4: eight codes of four bits, k 0 lowest, sign highest; the pairs
# are (lowest bit, sign) of k 0, 2, 4, 6, and the odd k after each lies sixteen bits higher.
_NVFP4_BITS = tuple(
    bit + high
    for first, sign in ((9, 15), (1, 7), (12, 8), (4, 0))
    for high in (0, 16)
    for bit in (first, first + 1, first + 2, sign)
)
# FP8: four codes of a byte; k 0 and 1 to bytes 1 and 3, k 2 and 3 to bytes 0 and 2.
_FP8_BITS = tuple(byte * 8 + bit for byte in (1, 3, 0, 2) for bit in range(8))

_SCALE_EXPONENT = 2.0**8  # what the kernel's float16 values lack


def can_pack(weight: Weight) -> bool:
    """Rows of x must begin at multiples of 16 bytes."""
    return not isinstance(weight, DenseWeight) and weight.shape[1] % 8 == 0


def pack_data(weight: Weight) -> Bytes:
    """The weight's codes, flat."""
    match weight:
        case Nvfp4Weight():
            return _pack_nvfp4(weight.data)
        case Fp8Weight():
            return _pack_fp8(weight.data.view(np.uint8))
        case DenseWeight():
            raise _not_quantized()


def pack_scales(weight: Weight) -> Bytes:
    """The block scales, flat; none of FP8."""
    if not isinstance(weight, Nvfp4Weight):
        return np.zeros(0, np.uint8)
    scales = _pad(np.ascontiguousarray(weight.block_scale).view(np.uint8), STEP // BLOCK)
    tiles, steps = scales.shape[0] // TILE_ROWS, scales.shape[1] * BLOCK // STEP
    pairs = scales.view(np.uint16).reshape(tiles, 2, _HALF_ROWS, steps, 4)
    return np.ascontiguousarray(pairs.transpose(0, 3, 2, 4, 1)).view(np.uint8).reshape(-1)


def factor(weight: Weight) -> float:
    """What a sum over the kernel's values is multiplied by in the end."""
    match weight:
        case Nvfp4Weight():
            return float(weight.global_scale) * _SCALE_EXPONENT
        case Fp8Weight():
            return float(weight.scale) * _SCALE_EXPONENT
        case DenseWeight():
            raise _not_quantized()


def packed_bytes(weight: Weight) -> int:
    """Of `pack_data` and `pack_scales` together, from the shape alone."""
    rows, k = (-(-size // unit) * unit for size, unit in zip(weight.shape, (TILE_ROWS, STEP), strict=True))
    return rows * k // 2 + rows * k // BLOCK if isinstance(weight, Nvfp4Weight) else rows * k


def _not_quantized() -> BuildError:
    return BuildError("only FP8 and NVFP4 weights are packed")


def _pack_nvfp4(data: Bytes) -> Bytes:
    """`data` [N, K/2]."""
    whole = _pad(data, STEP // 2)
    tiles, steps = whole.shape[0] // TILE_ROWS, whole.shape[1] // _ROW_BYTES
    packed = whole.reshape(tiles, 2, _HALF_ROWS, steps, _ROW_BYTES).transpose(0, 3, 1, 2, 4)
    return _move_bits(packed, _NVFP4_BITS)


def _pack_fp8(data: Bytes) -> Bytes:
    """`data` [N, K]."""
    whole = _pad(data, STEP)
    tiles, steps = whole.shape[0] // TILE_ROWS, whole.shape[1] // STEP
    packed = whole.reshape(tiles, 2, _HALF_ROWS, steps, 2, _ROW_BYTES).transpose(0, 3, 4, 1, 2, 5)
    return _move_bits(packed, _FP8_BITS)


def _move_bits(packed: Bytes, bits: tuple[int, ...]) -> Bytes:
    """A copy in which bit i of a word is bit `bits[i]`: a look-up for each half of it, in chunks that stay cached."""
    words = packed.copy().reshape(-1).view(np.uint32)
    low, high = _table(bits[:16]), _table(bits[16:])
    for start in range(0, len(words), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        part[:] = low[part & 0xFFFF] | high[part >> 16]
    return words.view(np.uint8)


@cache
def _table(bits: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """[65536]: every value of 16 bits with its bits moved."""
    values, moved = np.arange(1 << 16, dtype=np.uint32), np.zeros(1 << 16, np.uint32)
    for i, bit in enumerate(bits):
        moved |= ((values >> np.uint32(i)) & np.uint32(1)) << np.uint32(bit)
    return moved


def _pad(data: Bytes, width: int) -> Bytes:
    """Zeros up to multiples of a tile's rows and of `width`."""
    rows, columns = -data.shape[0] % TILE_ROWS, -data.shape[1] % width
    return np.pad(data, ((0, rows), (0, columns))) if rows or columns else data
