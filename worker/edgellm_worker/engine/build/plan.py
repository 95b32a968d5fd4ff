"""Device memory before anything is built: what an engine of a given size needs, from shapes alone.

weights           one resident copy, in the form in which they run
kv_cache          every slot at full capacity, base and draft
recurrent_state   one state per slot (never one per verify position) and the convolution's tail
pending           what a verify pass leaves to fold: k, u, log g in float32, convolution inputs in float16, per
                  position; k and log g are kept twice. And the hidden states carried to the draft head
workspace         values of the largest pass, its results, scratch of kernels and networks (build/workspace.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.segments import Segment, WeightGroup, cut
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.workspace import PassBytes, workspace_bytes
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.graph import Graph, Op
from edgellm_worker.engine.runtime.packed_weights import packed_bytes

_LIBRARY_BYTES = 512 << 20
"""The CUDA context, the library and its kernels: seen 0.4 to 0.5 GiB on an H200."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights_bytes: int
    kv_cache_bytes: int
    recurrent_state_bytes: int
    pending_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        parts = (self.weights_bytes, self.kv_cache_bytes, self.recurrent_state_bytes, self.pending_bytes)
        return sum(parts) + self.workspace_bytes + _LIBRARY_BYTES

    def describe(self) -> str:
        names = ("weights", "kv_cache", "recurrent_state", "pending", "workspace")
        return ", ".join(f"{name} {getattr(self, f'{name}_bytes') / 2**30:.2f}" for name in names)


@dataclass(frozen=True, slots=True)
class Passes:
    """What the passes of one draft length need, for any batch size."""

    weights_bytes: int
    work: PassBytes

    @classmethod
    def of(cls, drafted: Model, spec: EngineSpec, weights_bytes: int | None = None) -> Self:
        """`weights_bytes` where they are known already: they depend only on whether anything is drafted."""
        if weights_bytes is None:
            graphs = Recorder(drafted, spec.layout, spec.reader(has_values=False)).all(spec.prefill_chunk)
            weights_bytes = weight_bytes(graphs.values())
        return cls(weights_bytes, PassBytes.of(drafted, spec))


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One cell of the grid: a batch size, a draft length, its memory."""

    max_batch_size: int
    num_drafts: int
    memory: MemoryPlan


def plan_memory(model: Model, spec: EngineSpec, passes: Passes | None = None) -> MemoryPlan:
    """`passes` where they are known already: they do not depend on the batch."""
    drafted = spec.drafted(model)
    sizes = {"kv_cache": 0, "recurrent_state": 0, "pending": 0}
    for name, (shape, dtype) in spec.layout.tensors(drafted).items():
        sizes[memory_kind(name)] += int(np.prod(shape)) * dtype.num_bytes
    passes = passes or Passes.of(drafted, spec)
    return MemoryPlan(
        weights_bytes=passes.weights_bytes,
        kv_cache_bytes=sizes["kv_cache"],
        recurrent_state_bytes=sizes["recurrent_state"],
        pending_bytes=sizes["pending"],
        workspace_bytes=workspace_bytes(drafted, spec, passes.work),
    )


def plan_grid(model: Model, spec: EngineSpec, batches: Sequence[int], drafts: Sequence[int]) -> tuple[PlanRow, ...]:
    rows: list[PlanRow] = []
    weights: dict[bool, int] = {}
    for num_drafts in drafts:
        column = replace(spec, max_verify=num_drafts + 1, max_draft=num_drafts)
        passes = Passes.of(column.drafted(model), column, weights.get(num_drafts > 0))
        weights[num_drafts > 0] = passes.weights_bytes
        rows += (
            PlanRow(batch, num_drafts, plan_memory(model, replace(column, max_batch_size=batch), passes))
            for batch in batches
        )
    return tuple(rows)


def verify_state_bytes_per_position(model: Model, spec: EngineSpec, *, copies: int) -> int:
    """What one more verify position costs over all slots: 1 counts each pending value once, 2 counts k and log g as
    often as they are kept. Independent of the draft length: the recurrent state itself is never copied.
    """
    delta = model.config.delta_net
    if delta is None:
        return 0
    layers = sum(name.endswith(".state") for name in spec.layout.tensors(model))
    double = delta.num_key_heads * delta.key_dim * 4 + delta.num_value_heads * 4
    single = delta.num_value_heads * delta.value_dim * 4 + delta.num_channels * 2
    return layers * spec.max_batch_size * (copies * double + single)


def memory_kind(name: str) -> str:
    """The kind (as `Executor.memory_bytes` names them) of a state tensor."""
    field = name.rpartition(".")[2]
    if field in ("k", "v"):
        return "kv_cache"
    return "recurrent_state" if field in ("state", "tail") else "pending"


def weight_bytes(graphs: Iterable[Graph]) -> int:
    """Device bytes of everything the graphs read, shared data once."""
    found: dict[tuple[object, ...], int] = {}
    for graph in graphs:
        for step in cut(graph):
            if isinstance(step, Segment):
                for group in step.weight_groups:
                    found[tuple(map(_identity, group.weights))] = _group_bytes(group)
                continue
            weights = step.node.weights
            if step.node.op is Op.EMBED:
                found[_identity(weights[0]),] = 2 * int(np.prod(weights[0].shape))
            elif step.node.op is Op.PACKED_LINEAR:
                found["packed", _identity(weights[0])] = packed_bytes(weights[0])
                found.update({(_identity(bias),): 4 * int(np.prod(bias.shape)) for bias in weights[1:]})
    return sum(found.values())


def _group_bytes(group: WeightGroup) -> int:
    if not group.is_matrix:
        return sum(4 * int(np.prod(weight.shape)) for weight in group.weights)
    return sum(_matrix_bytes(weight) for weight in group.weights)


def _matrix_bytes(weight: Weight) -> int:
    size = int(np.prod(weight.shape))
    match weight:
        case DenseWeight():
            return 2 * size
        case Fp8Weight():
            return size
        case Nvfp4Weight():
            return size // 2 + size // 16


def _identity(weight: Weight) -> tuple[int, tuple[int, ...]]:
    return weight.data.ctypes.data, weight.shape
