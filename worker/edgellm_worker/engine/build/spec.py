"""What one TensorRT engine is built for: everything that its networks depend on, as data that a child can be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgellm_worker.engine.build.builder import BuildSettings, RowRange
from edgellm_worker.engine.build.passes import Recorder, StateLayout
from edgellm_worker.engine.build.profiles import row_ranges
from edgellm_worker.engine.build.segments import Segment, cut
from edgellm_worker.engine.build.weight_policy import WeightPolicy, WeightReader
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Lowering
from edgellm_worker.engine.trt import Target

REFUSED = 20
"""How a builder process exits where the library refused a network."""
MODEL_CODE_VERSION = 3
"""Raise it when recording or lowering changes what a plan computes: older bundles are then misses."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`max_verify` is the longest verify pass, 1 builds no draft head; `max_draft` the most drafts of a round (None:
    all but one of the verify pass). Lengths in tokens. `runs_fp8`, `runs_fp4` and `packs` as `WeightPolicy` has them.
    """

    max_batch_size: int
    max_kv_cache_capacity: int
    max_verify: int
    kv_dtype: KvDtype
    prefill_chunk: int = 128
    optimization_level: int | None = None
    target: Target = Target.CURRENT
    runs_fp8: bool = False
    runs_fp4: bool = False
    packs: bool = False
    lowering: Lowering = Lowering.ROWS
    max_draft: int | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> EngineSpec:
        """From `as_json`."""
        kinds: dict[str, Any] = {"kv_dtype": KvDtype(given["kv_dtype"]), "target": Target(given["target"])}
        kinds["lowering"] = Lowering(given["lowering"])
        return cls(**{**given, **kinds})

    def as_json(self) -> dict[str, Any]:
        enums = {"kv_dtype": self.kv_dtype, "target": self.target, "lowering": self.lowering}
        return {**asdict(self), **{name: member.value for name, member in enums.items()}}

    @property
    def layout(self) -> StateLayout:
        return StateLayout(self.max_batch_size, self.max_kv_cache_capacity, self.max_verify, self.kv_dtype)

    @property
    def settings(self) -> BuildSettings:
        return BuildSettings(self.target, self.optimization_level)

    @property
    def ranges(self) -> tuple[RowRange, ...]:
        return row_ranges(self.max_batch_size, self.max_verify, self.prefill_chunk)

    @property
    def max_draft_tree_size(self) -> int:
        return self.max_verify - 1 if self.max_draft is None else self.max_draft

    def drafted(self, model: Model) -> Model:
        """The model with its draft head only where there is room for drafts."""
        return model if self.max_verify > 1 else model.without_mtp()

    def reader(self, *, has_values: bool = True) -> WeightReader:
        """`has_values` as `WeightReader` has it."""
        return WeightReader(WeightPolicy(self.runs_fp8, self.runs_fp4, self.packs), has_values=has_values)

    def segments(self, model: Model, reader: WeightReader) -> dict[str, Segment]:
        """Every network this engine runs, by structural key."""
        found: dict[str, Segment] = {}
        for graph in Recorder(self.drafted(model), self.layout, reader).all(self.prefill_chunk).values():
            found.update({step.key: step for step in cut(graph, self.lowering) if isinstance(step, Segment)})
        return found
