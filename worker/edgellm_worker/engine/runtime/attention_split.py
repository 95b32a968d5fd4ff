"""How the attention kernels share out their work, and what blocks that share a context leave for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

_SPAN: Final = 128  # cache positions per block where the context is split, at least
_PROMPT_SPLITS: Final = 64  # the most blocks that share a prompt piece's context
TILE: Final = 64
_ENOUGH_BLOCKS: Final = 96  # query blocks that fill a GPU without splitting the context
STEP_ROWS: Final = 16  # of queries, a block of attend_step
_STEP_SPLIT_AT: Final = 512  # positions that one block of a step takes
_STEP_SPLITS: Final = 16  # the most blocks that share a step's context


@dataclass(frozen=True, slots=True)
class AttentionSplit:
    """`cells` are blocks of queries over all heads and rows, `q_blocks` a head; `splits` blocks share a cell's context
    of at most `capacity` positions, `span` each, and leave `bytes_per_cell` of partial results.
    """

    q_rows: int
    q_blocks: int
    cells: int
    span: int
    splits: int
    bytes_per_cell: int

    @property
    def num_bytes(self) -> int:
        return self.cells * self.bytes_per_cell

    @classmethod
    def of_prompt(cls, q: tuple[int, ...], num_kv_heads: int, capacity: int) -> Self:
        """kernels/attend.cu, for queries [B, N, H, d]."""
        batch, tokens, num_heads, dim = q
        rows = tokens * (num_heads // num_kv_heads)
        q_rows = 16 if rows <= 16 else 32
        q_blocks = -(-rows // q_rows)
        cells = batch * num_kv_heads * q_blocks
        fewest = _PROMPT_SPLITS if cells < _ENOUGH_BLOCKS else 1
        span = max(_SPAN, -(-capacity // (fewest * TILE)) * TILE)
        splits = -(-capacity // span)
        return cls(q_rows, q_blocks, cells, span, splits, 4 * splits * q_rows * (dim + 2) if splits > 1 else 4)

    @classmethod
    def of_step(cls, q: tuple[int, ...], num_kv_heads: int, capacity: int) -> Self:
        """kernels/attend_step.cu, which goes by the row's length on the device: at most as many."""
        batch, tokens, num_heads, dim = q
        q_blocks = -(-tokens * (num_heads // num_kv_heads) // STEP_ROWS)
        splits = min(-(-capacity // _STEP_SPLIT_AT), _STEP_SPLITS)
        cells = batch * num_kv_heads * q_blocks
        return cls(STEP_ROWS, q_blocks, cells, _STEP_SPLIT_AT, splits, 4 * splits * STEP_ROWS * (dim + 4))
