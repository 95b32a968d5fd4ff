"""From the operator's options, the library and the GPU to what is built. Decided before anything is compiled.

A default that the machine cannot run is narrowed, with a log line; an explicit wish that it cannot run is an error that
says what would work, all of them at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.weight_policy import WeightPolicy
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.checkpoint.weights import Fp8Weight, Nvfp4Weight
from edgellm_worker.engine.demands import KvCacheDtype, TreeSizes, WeightForm
from edgellm_worker.engine.errors import DemandError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.tensorrt import AsStored
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engine.trt import Library, Target

DEFAULT_DRAFTS: Final = 3
_OLDEST_FP8: Final = 89  # compute capability; older GPUs cannot convert e4m3
_OLDEST_FP4: Final = 100
_OLDEST_PACKED: Final = 80

_STORED: Final = {WeightForm.FP8: Fp8Weight, WeightForm.NVFP4: Nvfp4Weight}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """`architecture` as "sm90"."""

    library: Library
    architecture: str

    @property
    def capability(self) -> int:
        return int(self.architecture.removeprefix("sm"))

    @property
    def packs(self) -> bool:
        """Whether this package's kernel runs quantized weights at their own bytes."""
        return self.capability >= _OLDEST_PACKED

    @property
    def forms(self) -> frozenset[WeightForm]:
        """In which quantized forms weights run as they are stored."""
        return frozenset(_STORED) if self.packs else self.native_forms

    @property
    def native_forms(self) -> frozenset[WeightForm]:
        """What the library runs."""
        policy = WeightPolicy.of(self.library, Target.CURRENT)
        runs = {
            WeightForm.FP8: policy.runs_fp8 and self.capability >= _OLDEST_FP8,
            WeightForm.NVFP4: policy.runs_fp4 and self.capability >= _OLDEST_FP4,
        }
        return frozenset(form for form, is_run in runs.items() if is_run)

    def __str__(self) -> str:
        return f"{self.library.name} on {self.architecture}"


def drafting_of(model: Model, options: EngineOptions) -> SpeculativeConfig:
    if model.mtp is None:
        return SpeculativeConfig(0)
    return options.speculative or SpeculativeConfig(DEFAULT_DRAFTS)


def trees_of(model: Model, options: EngineOptions) -> TreeSizes:
    """Raises `CapacityError`."""
    if model.mtp is None:
        return TreeSizes(1, 0)
    num_drafts = drafting_of(model, options).num_speculative_tokens
    return TreeSizes.of(num_drafts, options.max_verify_tree_size, options.max_draft_tree_size)


def engine_spec(model: Model, kv_scheme: KvScheme, options: EngineOptions, machine: Machine) -> EngineSpec:
    """What to build. `kv_scheme` is the checkpoint's. Raises `DemandError` and `CapacityError`."""
    trees = trees_of(model, options)
    is_decoded = WeightForm.FLOAT16 in options.quantization
    forms = frozenset() if is_decoded else machine.native_forms
    capacity = min(options.max_kv_cache_capacity, model.config.max_positions)
    if capacity < options.max_kv_cache_capacity:
        _log.warning("max_kv_cache_capacity narrowed from %d to %d", options.max_kv_cache_capacity, capacity)
    spec = EngineSpec(
        max_batch_size=options.max_batch_size,
        max_kv_cache_capacity=capacity,
        max_verify=trees.max_verify_tree_size,
        kv_dtype=_kv_dtype(kv_scheme, options.kv_cache_dtype, machine),
        prefill_chunk=options.prefill_chunk_tokens,
        runs_fp8=WeightForm.FP8 in forms,
        runs_fp4=WeightForm.NVFP4 in forms,
        packs=machine.packs and not is_decoded,
        lowering=machine.library.lowering,
        max_draft=trees.max_draft_tree_size,
    )
    problems = _unmet(model, spec, options, machine)
    if problems:
        raise DemandError("\n".join(problems))
    return spec


def _kv_dtype(scheme: KvScheme, wanted: KvCacheDtype, machine: Machine) -> KvDtype:
    if wanted is not KvCacheDtype.AUTO:
        return KvDtype(wanted.value)
    if scheme is KvScheme.UNQUANTIZED:
        return KvDtype.FLOAT16
    if machine.capability < _OLDEST_FP8:
        _log.warning("this GPU (%s) cannot convert FP8: the KV cache is kept in float16", machine.architecture)
        return KvDtype.FLOAT16
    return KvDtype.FP8


def _unmet(model: Model, spec: EngineSpec, options: EngineOptions, machine: Machine) -> list[str]:
    wanted = options.quantization - {WeightForm.FLOAT16}
    stored = stored_forms(model, spec) if wanted else frozenset()
    problems = absent_forms(wanted, stored)
    problems += [
        f"quantization {form}: {machine} cannot run it (compute capability 8.0 or later can); quantization float16, or"
        " leaving it out, decodes such weights to float16"
        for form in sorted(wanted & stored - machine.forms)
    ]
    if options.kv_cache_dtype is KvCacheDtype.FP8 and machine.capability < _OLDEST_FP8:
        problems.append(
            f"kv-cache-dtype fp8: {machine} cannot convert it (compute capability 8.9 or later can); kv-cache-dtype"
            " float16 works, and auto falls back to it"
        )
    return problems


def absent_forms(wanted: frozenset[WeightForm], stored: frozenset[WeightForm]) -> list[str]:
    """A problem for each form that was asked for and that the checkpoint does not have."""
    return [
        f"quantization {form}: the checkpoint has no such weights; its quantized ones are"
        f" {', '.join(sorted(stored)) or 'none'}"
        for form in sorted(wanted - stored)
    ]


def stored_forms(model: Model, spec: EngineSpec) -> frozenset[WeightForm]:
    """The quantized forms among the weights of every pass that this engine runs."""
    graphs = Recorder(spec.drafted(model), spec.layout, AsStored()).all(spec.prefill_chunk).values()
    kinds = {type(weight) for graph in graphs for node in graph.nodes for weight in node.weights}
    return frozenset(form for form, kind in _STORED.items() if kind in kinds)
