"""The element types of safetensors files, one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

# Names as https://huggingface.co/docs/safetensors writes them. Sub-byte types (F4, F6_*) are not in use by any layout
# that this product reads: NVFP4 is stored as packed U8.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

# What a plain, unquantized tensor may be stored as.
DENSE_DTYPES = frozenset({"BF16", "F16", "F32"})

# (unsigned view, mask of the exponent): an element is NaN or infinite iff all masked bits are set. E4M3 in the "fn"
# form has no infinity and one NaN magnitude, 0x7F, so its mask takes in the mantissa.
NON_FINITE_MASKS: Mapping[str, tuple[np.dtype[Any], int]] = {
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F8_E4M3": (np.dtype("u1"), 0x7F),
}
