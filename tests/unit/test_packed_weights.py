"""Packed weights, read back as the kernel reads them: every address and every operation is kernels/packed.cu's."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import Fp8Weight, Nvfp4Weight
from edgellm_worker.engine.runtime.packed_linear import variant_for
from edgellm_worker.engine.runtime.packed_weights import factor, pack_data, pack_scales, packed_bytes

SHAPES = ((16, 128), (48, 256), (1, 16), (35, 208))  # whole tiles; one row and block; neither rows nor k whole


def nvfp4(n: int, k: int) -> Nvfp4Weight:
    """All codes under all finite scales."""
    rng = np.random.default_rng(n * k)
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), n * k // 2)).reshape(n, k // 2)
    scales = rng.permutation(np.resize(np.delete(np.arange(256, dtype=np.uint8), (127, 255)), n * k // 16))
    return Nvfp4Weight(codes, scales.reshape(n, k // 16).view(ml_dtypes.float8_e4m3fn), np.float32(1))


def fp8(n: int, k: int) -> Fp8Weight:
    codes = np.resize(np.delete(np.arange(256, dtype=np.uint8), (127, 255)), (n, k))
    return Fp8Weight(codes.view(ml_dtypes.float8_e4m3fn), np.float32(1))


def halves(words: np.ndarray, is_high: np.ndarray) -> np.ndarray:
    return np.where(is_high, words >> 16, words & 0xFFFF).astype(np.uint16).view(np.float16)


def widen8(v: np.ndarray) -> np.ndarray:
    return (v & 0x80008000) | ((v >> 1) & 0x3F803F80)


def read_nvfp4(data: np.ndarray, scales: np.ndarray, n: np.ndarray, k: np.ndarray, num_steps: int) -> np.ndarray:
    """float16 of weight [n, k], as lane 4 * row + quarter makes it."""
    tile, half, lane = n // 16 * num_steps + k // 128, n % 16 // 8, n % 8 * 4 + k % 128 // 32
    word = data.view(np.uint32)[(tile * 1024 + half * 512 + lane * 16 + k % 32 // 8 * 4) // 4]
    pairs = [
        word & 0x8E008E00,
        (word << 8) & 0x8E008E00,
        ((word << 7) & 0x80008000) | ((word >> 3) & 0x0E000E00),
        ((word << 15) & 0x80008000) | ((word << 5) & 0x0E000E00),
    ]
    scale = scales[tile * 128 + lane * 4 + half * 2 + k % 32 // 16].astype(np.uint32)
    wide = halves(widen8(scale << 8 | scale << 24), k % 2 == 1) * np.float16(2**14)
    return halves(np.choose(k % 8 // 2, pairs), k % 2 == 1) * wide


def read_fp8(data: np.ndarray, n: np.ndarray, k: np.ndarray, num_steps: int) -> np.ndarray:
    tile, half, lane = n // 16 * num_steps + k // 128, n % 16 // 8, n % 8 * 4 + k % 64 // 16
    word = data.view(np.uint32)[(tile * 2048 + k % 128 // 64 * 1024 + half * 512 + lane * 16 + k % 16 // 4 * 4) // 4]
    return halves(np.where(k % 4 < 2, widen8(word), widen8(word << 8)), k % 2 == 1)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("make", [nvfp4, fp8])
def test_the_kernel_reads_exactly_the_checkpoints_values(make, n: int, k: int) -> None:
    """Without rounding: float16 holds each value times 2^-8, for every code under every scale. What pads is zero."""
    weight = make(n, k)
    data, scales = pack_data(weight), pack_scales(weight)
    num_steps = -(-k // 128)
    row, column = (axis.ravel() for axis in np.indices((-(-n // 16) * 16, num_steps * 128)))
    if isinstance(weight, Nvfp4Weight):
        found = read_nvfp4(data, scales, row, column, num_steps)
    else:
        found = read_fp8(data, row, column, num_steps)
    want = np.zeros((-(-n // 16) * 16, num_steps * 128))
    want[:n, :k] = decode(weight)
    assert np.array_equal(found.astype(np.float64).reshape(want.shape) * factor(weight), want)
    assert data.nbytes + scales.nbytes == packed_bytes(weight)


def test_the_scale_of_the_whole_tensor_is_applied_to_the_sum() -> None:
    four, eight = nvfp4(16, 128), fp8(16, 128)
    assert factor(replace(four, global_scale=np.float32(0.3))) == 256 * np.float32(0.3)
    assert factor(replace(eight, scale=np.float32(0.07))) == 256 * np.float32(0.07)


def test_packing_leaves_the_checkpoint_as_it_is() -> None:
    """A weight of one tile needs no other order of rows: its bytes are copied all the same."""
    for weight in (nvfp4(16, 128), fp8(8, 64)):
        weight.data.setflags(write=False)
        before = weight.data.view(np.uint8).copy()
        pack_data(weight)
        assert np.array_equal(weight.data.view(np.uint8), before)


@pytest.mark.parametrize("is_fp4", [True, False])
def test_every_number_of_rows_has_a_kernel_that_fits(is_fp4: bool) -> None:
    """The weight is read once for every 48 rows; two stages or more lie in the shared memory of the smallest GPU."""
    for num_rows in range(1, 2049):
        variant = variant_for(num_rows, is_fp4=is_fp4)
        assert -(-num_rows // variant.rows) == -(-num_rows // 48)
        assert variant.num_stages >= 2
        assert variant.num_stages * variant.stage_bytes <= 99 * 1024 - 1024 - 128
