"""Numbers that cannot be: NaN or infinite weights and scales, scales that are negative, zeros that would be divided by.

Scalars are looked at whenever a checkpoint is opened. Whole tensors are read for it only on request, through a small
buffer rather than the mapping, so that looking through 20 GB does not take 20 GB of resident memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import BinaryIO

import numpy as np

from edgellm_worker.engine.checkpoint.dtypes import NON_FINITE_MASKS
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.shard import Shard, TensorEntry

CHUNK_BYTES = 4 * 2**20

# Scalars by their last name: is zero allowed? A weight of zeros has the multiplier zero; the others are divided by.
MAY_BE_ZERO: Mapping[str, bool] = {
    "weight_scale": True,
    "weight_scale_2": True,
    "weight_global_scale": False,
    "input_scale": False,
    "input_global_scale": False,
    "k_scale": False,
    "v_scale": False,
}


def read_scalar(shard: Shard, entry: TensorEntry) -> np.float32:
    """A tensor of one number as float32, exactly (BF16 and FP16 widen)."""
    return np.float32(shard.array(entry).reshape(1).astype(np.float32)[0])


def check_scalars(entries: Iterable[TensorEntry], shards: Mapping[str, Shard], problems: ProblemLog) -> None:
    for entry in entries:
        value = read_scalar(shards[entry.file], entry)
        may_be_zero = MAY_BE_ZERO[entry.name.rpartition(".")[2]]
        if not np.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            problems.add(entry.file, f"a scale cannot be {value}", tensor=entry.name)


def check_finite(entries: Iterable[TensorEntry], shards: Mapping[str, Shard], problems: ProblemLog) -> None:
    """Every element of every tensor. Packed and integer tensors have no such values."""
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if entry.dtype in NON_FINITE_MASKS:
            by_file.setdefault(entry.file, []).append(entry)
    for file, held in by_file.items():
        with shards[file].path.open("rb", buffering=0) as stream:
            for entry in sorted(held, key=lambda one: one.start):
                bad = _first_non_finite(stream, entry)
                if bad is not None:
                    where = [int(index) for index in np.unravel_index(bad, entry.shape)]
                    problems.add(file, f"NaN or infinite, first at {where}", tensor=entry.name)


def _first_non_finite(stream: BinaryIO, entry: TensorEntry) -> int | None:
    """The flat index of the first such element, or None."""
    dtype, mask = NON_FINITE_MASKS[entry.dtype]
    position = 0
    stream.seek(entry.start)
    while position < entry.num_elements:
        wanted = min(CHUNK_BYTES, entry.num_bytes - position * dtype.itemsize)
        bits = np.frombuffer(stream.read(wanted), dtype)
        if bits.size == 0:  # the file has shrunk since its header was read
            return position
        bad = (bits & dtype.type(mask)) == mask
        if bad.any():
            return position + int(bad.argmax())
        position += bits.size
    return None
