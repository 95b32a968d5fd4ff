"""Products of few rows as kernel calls (kernels/linear.cu), where networks hold products alone (`Lowering.PRODUCTS`).

At the rows of a step a product takes as long as reading its weight; TensorRT 8.6's kernels take longer. Which products
these are is `is_own_product`; the networks have the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm_worker.engine.build.segments import Segment
from edgellm_worker.engine.runtime.cuda import Cuda, Kernel
from edgellm_worker.engine.runtime.scratch import Scratch
from edgellm_worker.engine.runtime.tensorrt_layout import is_own_product
from edgellm_worker.engine.runtime.tensorrt_place import Place
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore

Launch = Callable[[], None]
CompileKernel = Callable[[str, str, str, dict[str, int], int], Kernel]

_COLUMNS, _CHUNK, _THREADS = 64, 64, 160  # of a block, as the kernel has them; elements of the depth
_LEAST_STAGES, _MOST_STAGES = 3, 8  # chunks in shared memory at once, and one that is filled: no more than there are
_ALONE_BYTES, _SHARING_BYTES = 96 << 10, 73 << 10
"""Of a block's stages, where it has the whole depth and where several share it: two and three find room in a
multiprocessor, with the next kernel's. Measured on an H200 in the order of a layer (docs/benchmarks.md)."""
_BLOCKS = 2  # of a multiprocessor: the depth is shared until there are as many
_MOST_SPLITS = 8  # the largest cluster that every GPU with clusters takes
_LEAST_CHUNKS = 4  # of a block: a shorter share of the depth costs more than it reads


@dataclass(slots=True)
class Products:
    """`kernel` compiles once per set of macros."""

    cuda: Cuda
    weights: WeightStore
    kernel: CompileKernel
    _partial: Scratch = field(init=False)
    _arrived: Scratch = field(init=False)

    def __post_init__(self) -> None:
        self._partial, self._arrived = Scratch(self.cuda), Scratch(self.cuda)

    def prepare(self, segment: Segment, place: Place) -> Launch | None:
        """-> what launches the segment's only product, with the activation behind it that `place.layout` gave to it;
        None where a network must run it.
        """
        if not is_own_product(segment):
            return None
        (group,) = segment.weight_groups
        rows, width, depth = segment.num_rows, sum(w.shape[0] for w in group.weights), group.weights[0].shape[1]
        activation = place.layout.activations.get(segment.outputs[0])
        tiles = -(-rows // 8)
        blocks = -(-width // _COLUMNS)
        splits = 1 if activation is not None else self._splits(blocks, depth)
        is_cluster = self.cuda.has_clusters and splits > 1
        partial, arrived = (0, 0)
        if splits > 1 and not is_cluster:
            partial = self._partial.place(blocks * 4 * splits * tiles * 8 * _COLUMNS)
            arrived = self._arrived.place(4 * blocks)
        stage_bytes = (_COLUMNS + tiles * 8) * _CHUNK * 2
        most_bytes = _ALONE_BYTES if splits == 1 else _SHARING_BYTES
        chunks = -(-depth // (_CHUNK * splits))
        stages = max(min(most_bytes // stage_bytes, _MOST_STAGES, chunks + 1), _LEAST_STAGES)
        macros = {"TILES": tiles, "STAGES": stages, "CLUSTER": int(self.cuda.has_clusters)}
        macros["SWIGLU"] = int(activation is not None)
        kernel = self.kernel("linear", "linear", "ppppp" + "iii", macros, stages * stage_bytes)
        out = segment.outputs[0] if activation is None else activation.outputs[0]
        pointers = (place.pointer(segment.inputs[0]), self.weights.inputs(group)[""], place.heads(out).pointer)
        arguments = (*pointers, partial, arrived, rows, width, depth)
        return lambda: self.cuda.run(kernel, (blocks, splits, 1), _THREADS, arguments, is_cluster=is_cluster)

    def _splits(self, blocks: int, depth: int) -> int:
        """How many blocks share the depth: as many as the GPU holds at once, as long as each has enough to read. Not by
        the rows: a row is to have the same bits in any batch.
        """
        room = _BLOCKS * self.cuda.num_multiprocessors // blocks
        return max(1, min(room, _MOST_SPLITS, -(-depth // _CHUNK) // _LEAST_CHUNKS))
