"""The row counts that networks are tuned for, and those that prompts are read in.

A segment sees rows = B * N. Few rows are bound by reading weights, so the kernels that suit 1 row suit 8; a full verify
pass and a prompt chunk get a tuning of their own.
"""

from __future__ import annotations

from typing import Final

from edgellm_worker.engine.build.builder import RowRange

_FEW: Final = 8
_PROMPT_SIZES: Final = (16, 32, 48, 64, 96, 128, 256, 512)


def prompt_sizes(prefill_chunk: int) -> list[int]:
    """Tokens of the passes that read prompts: a piece is filled up to the next of these."""
    return [*(size for size in _PROMPT_SIZES if size < prefill_chunk), prefill_chunk]


def row_ranges(num_slots: int, max_verify: int, prefill_chunk: int) -> tuple[RowRange, ...]:
    """Consecutive ranges from 1 row to the largest pass."""
    full, most = num_slots * max_verify, max(num_slots * max_verify, prefill_chunk)
    ends = sorted({min(_FEW, most), full, most} - set(range(1, min(_FEW, most))))
    ranges: list[RowRange] = []
    least = 1
    for end in ends:
        ranges.append(RowRange(least, max(least, end * 3 // 4), end))
        least = end + 1
    return tuple(ranges)
