"""One namespace's weights by name: what a model is built from.

Names are those of layout.py: `layers.0.mlp.down_proj` is a matrix, `layers.0.input_layernorm.weight` a plain tensor.
Everything is a view into the mapped files; only fused or reciprocal pieces are computed, and those are scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.checkpoint.kv import KvPlan
from edgellm_worker.engine.checkpoint.layout import SHARED_WITH_DRAFT, Namespace
from edgellm_worker.engine.checkpoint.model import Model
from edgellm_worker.engine.checkpoint.quantization import Scheme
from edgellm_worker.engine.checkpoint.resolve import LinearSource, Resolution
from edgellm_worker.engine.checkpoint.shard import Shard, TensorEntry
from edgellm_worker.engine.checkpoint.values import read_scalar
from edgellm_worker.engine.checkpoint.weights import (
    Array,
    DenseWeight,
    Fp8Weight,
    KvScales,
    Nvfp4Weight,
    Weight,
)
from edgellm_worker.engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class WeightView:
    """`base` is the view that the draft borrows embedding and head from; None for the base itself."""

    namespace: Namespace
    _model: Model
    _shards: Mapping[str, Shard]
    base: WeightView | None = None

    @property
    def kv(self) -> KvPlan:
        """How this namespace's KV cache is kept, and why."""
        return self._model.kv[self.namespace]

    @property
    def _resolution(self) -> Resolution:
        return self._model.resolution

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that full name (`lm_head.weight`), own, tied or borrowed."""
        module, _, leaf = name.rpartition(".")
        if (self.namespace, name) in self._resolution.arrays:
            return True
        if leaf != "weight":
            return False
        if (self.namespace, module) in self._resolution.linears or self._is_tied_head(module):
            return True
        return self.base is not None and module in SHARED_WITH_DRAFT and self.base.has(name)

    def weight(self, name: str) -> Weight:
        """The weight of module `name`, quantized or not. Raises `CheckpointError` where there is no such module."""
        source = self._resolution.linears.get((self.namespace, name))
        if source is not None:
            return _READERS[source.scheme](self, source)
        plain = self._resolution.arrays.get((self.namespace, f"{name}.weight"))
        if plain is not None:
            return DenseWeight(self._data(plain.tensor))
        if self._is_tied_head(name):
            return self.weight("embed_tokens")
        if self.base is not None and name in SHARED_WITH_DRAFT:
            return self.base.weight(name)
        raise CheckpointError([f"{self.namespace}: no module {name}"])

    def array(self, name: str) -> DenseWeight:
        """The plain tensor of that full name (`layers.0.linear_attn.A_log`). Raises `CheckpointError`."""
        source = self._resolution.arrays.get((self.namespace, name))
        if source is None:
            raise CheckpointError([f"{self.namespace}: no tensor {name}"])
        return DenseWeight(self._data(source.tensor))

    def kv_scales(self, layer: int) -> KvScales:
        """Scales of attention layer `layer`; 1.0 where the files have none (the plan's reason says so)."""
        pair = self.kv.pairs[layer]
        one = np.float32(1)
        return KvScales(
            k_scale=one if pair.k_scale is None else self._scalar(pair.k_scale),
            v_scale=one if pair.v_scale is None else self._scalar(pair.v_scale),
        )

    def _is_tied_head(self, name: str) -> bool:
        return name == "lm_head" and self._model.config.has_tied_head

    def _data(self, entry: TensorEntry) -> Array:
        return self._shards[entry.file].array(entry)

    def _scalar(self, entry: TensorEntry) -> np.float32:
        return read_scalar(self._shards[entry.file], entry)

    def _factor(self, source: LinearSource, leaf: str) -> np.float32:
        """A scale to multiply by, whichever way round the form stores it."""
        value = self._scalar(source.tensors[leaf])
        return np.float32(1) / value if source.form.is_reciprocal else value

    def _input_scale(self, source: LinearSource) -> np.float32 | None:
        leaf = source.form.optional[0]
        return self._factor(source, leaf) if leaf in source.tensors else None

    def _dense(self, source: LinearSource) -> DenseWeight:
        return DenseWeight(self._data(source.tensors[source.form.weight])[source.rows])

    def _fp8(self, source: LinearSource) -> Fp8Weight:
        return Fp8Weight(
            data=self._data(source.tensors[source.form.weight])[source.rows],
            scale=self._factor(source, source.form.scalars[0]),
            input_scale=self._input_scale(source),
        )

    def _nvfp4(self, source: LinearSource) -> Nvfp4Weight:
        return Nvfp4Weight(
            data=self._data(source.tensors[source.form.weight])[source.rows],
            block_scale=self._data(source.tensors["weight_scale"])[source.rows],
            global_scale=self._factor(source, source.form.scalars[0]),
            input_scale=self._input_scale(source),
        )


_READERS: Mapping[Scheme, Callable[[WeightView, LinearSource], Weight]] = {
    Scheme.DENSE: WeightView._dense,  # noqa: SLF001 - the class's own table
    Scheme.FP8: WeightView._fp8,  # noqa: SLF001
    Scheme.NVFP4: WeightView._nvfp4,  # noqa: SLF001
}
