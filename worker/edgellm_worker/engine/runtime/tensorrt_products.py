"""Products of few rows as kernel calls (kernels/linear.cu), where networks hold products alone (`Lowering.PRODUCTS`).

At the rows of a step a product takes as long as reading its weight; TensorRT 8.6's kernels take about twice that. The
networks stay for more rows than MOST_ROWS, and for what this kernel does not take: biases and quantized weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm_worker.engine.build.segments import Segment
from edgellm_worker.engine.checkpoint.weights import DenseWeight
from edgellm_worker.engine.runtime.cuda import Cuda, Kernel
from edgellm_worker.engine.runtime.tensorrt_place import Place
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore

Launch = Callable[[], None]
CompileKernel = Callable[[str, str, str, dict[str, int], int], Kernel]

MOST_ROWS = 24
"""Above this the kernel reads x too often: at 32 rows the networks were faster on an H200 (docs/benchmarks.md)."""

_COLUMNS, _WARPS, _CHUNK = 32, 8, 32  # of a block, as the kernel has them; elements of the depth
_ENOUGH_BLOCKS = 150
_LEAST_CHUNKS = 2  # of a warp: a shorter share of the depth costs more than it reads


@dataclass(slots=True)
class Products:
    """`kernel` compiles once per set of macros. Scratch for shared depths is one for a stream: its calls run one at
    a time.
    """

    cuda: Cuda
    weights: WeightStore
    kernel: CompileKernel
    _scratch: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    def prepare(self, segment: Segment, place: Place) -> Launch | None:
        """-> what launches the segment's only product, or None where a network must run it."""
        group = segment.weight_groups[0]
        rows = segment.num_rows
        is_plain = len(segment.nodes) == len(segment.weight_groups) == len(segment.outputs) == 1
        if not is_plain or rows > MOST_ROWS or not all(isinstance(weight, DenseWeight) for weight in group.weights):
            return None
        width, depth = sum(weight.shape[0] for weight in group.weights), group.weights[0].shape[1]
        if depth % _CHUNK:
            return None
        tiles, blocks = -(-rows // 8), -(-width // _COLUMNS)
        splits = _splits(blocks, depth)
        partial, arrived = self._split_scratch(blocks, 4 * splits * tiles * 8 * _COLUMNS)
        shared = 4 * _WARPS * tiles * 8 * (_COLUMNS + 1)
        kernel = self.kernel("linear", "linear", "ppppp" + "iii", {"TILES": tiles}, shared)
        pointers = (place.pointer(segment.inputs[0]), self.weights.inputs(group)[""])
        out = place.heads(segment.outputs[0]).pointer
        arguments = (*pointers, out, partial, arrived, rows, width, depth)
        return lambda: self.cuda.run(kernel, (blocks, splits, 1), 32 * _WARPS, arguments)

    def _split_scratch(self, blocks: int, bytes_per_block: int) -> tuple[int, int]:
        need, stream = blocks * bytes_per_block, int(self.cuda.stream)
        for (its_stream, num_bytes, num_blocks), scratch in self._scratch.items():
            if its_stream == stream and num_bytes >= need and num_blocks >= blocks:
                return scratch
        made = (self.cuda.allocate(need), self.cuda.allocate(4 * blocks, zero=True))
        self._scratch[stream, need, blocks] = made
        return made


def _splits(blocks: int, depth: int) -> int:
    """How many blocks share the depth: until the GPU is busy, as long as each warp has enough to read."""
    splits = 1
    while blocks * splits < _ENOUGH_BLOCKS and depth >= 2 * splits * _CHUNK * _WARPS * _LEAST_CHUNKS:
        splits *= 2
    return splits
