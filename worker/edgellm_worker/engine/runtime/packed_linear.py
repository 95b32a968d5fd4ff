"""How a product with a packed weight is launched (kernels/packed.cu): which variant, over how many blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgellm_worker.engine.runtime.cuda import Cuda, Kernel
from edgellm_worker.engine.runtime.packed_weights import STEP, TILE_ROWS
from edgellm_worker.engine.runtime.scratch import Scratch

Launch = Callable[[], None]

_WARPS, _ROW_TILES = 8, 2  # as the kernel has them
_ROWS_PER_BLOCK = _WARPS * _ROW_TILES * TILE_ROWS
_THREADS = 32 * _WARPS

_ROWS_PER_TILE = 8
_TILES = (1, 2, 3, 4, 6)  # of x rows, in registers at once; more rows read the weight again
_STAGES = (4, 3, 2)
_MOST_STAGE_BYTES = 96 << 10  # of a block: every GPU since SM80 has 99 KiB
_MOST_OF_NARROW = 74 << 10  # with one tile of x rows registers leave room for three blocks: so should shared memory
_LEAST_UNITS = 2  # of a block's run: starting a shorter one costs more than it reads


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for."""

    is_fp4: bool
    x_tiles: int

    @property
    def rows(self) -> int:
        return self.x_tiles * _ROWS_PER_TILE

    @property
    def stage_bytes(self) -> int:
        """One unit in shared memory: weights and their scales, rows of x with their padding."""
        row_tile = 1024 + 128 if self.is_fp4 else 2048
        return _WARPS * _ROW_TILES * row_tile + self.rows * (2 * STEP + 64)

    @property
    def num_stages(self) -> int:
        most = _MOST_OF_NARROW if self.x_tiles == 1 else _MOST_STAGE_BYTES
        return next(count for count in _STAGES if count * self.stage_bytes <= most)

    @property
    def macros(self) -> dict[str, int]:
        return {"FP4": int(self.is_fp4), "NT": self.x_tiles, "STAGES": self.num_stages}

    @property
    def partial_bytes(self) -> int:
        """What one block may leave: sums of two tiles."""
        return 2 * 4 * _ROWS_PER_BLOCK * self.rows


def variant_for(num_rows: int, *, is_fp4: bool) -> Variant:
    """The narrowest that takes the rows in as few readings of the weight as can be."""
    readings = -(-num_rows // (_TILES[-1] * _ROWS_PER_TILE))
    tiles = -(-num_rows // (readings * _ROWS_PER_TILE))
    return Variant(is_fp4, next(count for count in _TILES if count >= tiles))


@dataclass(frozen=True, slots=True)
class Operands:
    """Device pointers (`bias` 0: none) and sizes: y[m, n] = x[m, k] @ weight[n, k]^T + bias, y and x float16."""

    x: int
    weight: int
    scales: int
    bias: int
    y: int
    m: int
    n: int
    k: int
    factor: float


class PackedLinear:
    """Scratch for partial sums is as large as a variant can ever need, so that one allocation serves products of every
    shape.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._kernels: dict[Variant, tuple[Kernel, int]] = {}
        self._partial, self._arrived = Scratch(cuda), Scratch(cuda)

    def prepare(self, operands: Operands, *, is_fp4: bool) -> Launch:
        variant = variant_for(operands.m, is_fp4=is_fp4)
        kernel, resident = self._kernel(variant)
        tiles = -(-operands.n // _ROWS_PER_BLOCK) * -(-operands.m // variant.rows)
        units = tiles * -(-operands.k // STEP)
        blocks = max(1, min(resident, units // _LEAST_UNITS))
        partial = self._partial.place(resident * variant.partial_bytes)
        arrived = self._arrived.place(4 * tiles)
        pointers = (operands.x, operands.weight, operands.scales, operands.bias, operands.y, partial, arrived)
        run, longer = divmod(units, blocks)
        arguments = (*pointers, operands.m, operands.n, operands.k, run, longer, operands.factor)
        return lambda: self._cuda.run(kernel, (blocks, 1, 1), _THREADS, arguments)

    def _kernel(self, variant: Variant) -> tuple[Kernel, int]:
        """And how many blocks the GPU holds at once."""
        if variant not in self._kernels:
            module = self._cuda.compile("packed", variant.macros)
            kernel = module.kernel("packed_linear", "p" * 7 + "iiiiif", variant.num_stages * variant.stage_bytes)
            self._kernels[variant] = (kernel, self._cuda.resident_blocks(kernel, _THREADS))
        return self._kernels[variant]
