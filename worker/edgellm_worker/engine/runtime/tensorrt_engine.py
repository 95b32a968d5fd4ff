"""The engine kind "tensorrt": the speculative loop over a GPU, its networks from a bundle that is built when needed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from edgellm_worker.engine.api import Engine, EngineLimits, EngineTraits
from edgellm_worker.engine.build.builder import collecting_logger
from edgellm_worker.engine.build.bundle import Bundle, BundleKey, compile_in_children, ensure_bundle
from edgellm_worker.engine.build.plan import MemoryPlan, plan_memory
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.build.weight_policy import WeightPolicy
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.errors import CapacityError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.grammar import GrammarCompiler
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine, SpeculativeOptions
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from edgellm_worker.engine.runtime.tensorrt_program import Engines
from edgellm_worker.engine.trt import Library, Target, load_library

NAME: Final = "tensorrt"
DEFAULT_DRAFTS: Final = 3
_OLDEST_FP8: Final = 89  # compute capability; older GPUs cannot convert e4m3

_log = logging.getLogger(__name__)


def open_engine(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Build the bundle if the cache has none (`build` does it ahead of time), then load it.

    Raises `BuildError`, `CapacityError`, `CheckpointError`, `EngineError`.
    """
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    library = load_library()
    cuda = Cuda()
    try:
        spec = engine_spec(model, checkpoint, options, library, cuda.architecture)
        _require_room(plan_memory(model, spec), cuda)
        bundle, _ = _bundle(checkpoint.path, model, spec, library, cuda.architecture, options.cache_dir)
        engines = Engines(library, cuda, collecting_logger(library))
        engines.load(bundle.plans)
        executor = TensorRtExecutor(
            model,
            spec.layout,
            cuda,
            engines,
            spec.reader(),
            TensorRtOptions(spec.prefill_chunk, lowering=spec.lowering),
        )
    except BaseException:
        cuda.close()
        raise
    drafting = _drafting(model, options)
    executor.warm_up(sorted({0, spec.max_verify - 1}))
    limits = engine_limits(model, spec, options)
    traits = EngineTraits(
        name=f"{NAME} ({library.name}, {cuda.name})",
        in_flight=True,
        seeded=True,
        drafts_when_sampled=spec.max_verify > 1,
        speculative_method=_method(model, spec),
    )
    grammars = GrammarCompiler(checkpoint.path / "tokenizer.json", model.config.vocab_size)
    loop = SpeculativeOptions(limits, traits, drafting.draft_length(), options.prefill_chunk_tokens, grammars)
    return SpeculativeEngine(executor, loop)


def build_bundle(checkpoint: Checkpoint, options: EngineOptions) -> str:
    """What the `build` command does for this engine."""
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    library = load_library()
    with Cuda() as cuda:
        spec = engine_spec(model, checkpoint, options, library, cuda.architecture)
        architecture = cuda.architecture
    bundle, was_cached = _bundle(checkpoint.path, model, spec, library, architecture, options.cache_dir)
    state = "already built" if was_cached else "built"
    size = sum(map(len, bundle.plans.values()))
    return f"{bundle.path}: {state}, {len(bundle.plans)} networks, {size / 1e6:.1f} MB ({library.name}, {architecture})"


def engine_spec(
    model: Model, checkpoint: Checkpoint, options: EngineOptions, library: Library, architecture: str
) -> EngineSpec:
    """What to build for these options. Narrowed defaults are logged."""
    policy = WeightPolicy.of(library, Target.CURRENT)
    capability = int(architecture.removeprefix("sm"))
    has_fp8 = capability >= _OLDEST_FP8
    kv_dtype = KvDtype.FP8 if checkpoint.base.kv.scheme is KvScheme.FP8 else KvDtype.FLOAT16
    if kv_dtype is KvDtype.FP8 and not has_fp8:
        _log.warning("this GPU (%s) cannot convert FP8: the KV cache is kept in float16", architecture)
        kv_dtype = KvDtype.FLOAT16
    capacity = min(options.max_kv_cache_capacity, model.config.max_positions)
    if capacity < options.max_kv_cache_capacity:
        _log.warning("max_kv_cache_capacity narrowed from %d to %d", options.max_kv_cache_capacity, capacity)
    return EngineSpec(
        max_batch_size=options.max_batch_size,
        max_kv_cache_capacity=capacity,
        max_verify=_drafting(model, options).num_speculative_tokens + 1,
        kv_dtype=kv_dtype,
        prefill_chunk=options.prefill_chunk_tokens,
        runs_fp8=policy.runs_fp8 and has_fp8,
        runs_fp4=policy.runs_fp4 and capability >= 100,
        lowering=library.lowering,
    )


def engine_limits(model: Model, spec: EngineSpec, options: EngineOptions) -> EngineLimits:
    num_drafts = spec.max_verify - 1
    return EngineLimits(
        max_batch_size=spec.max_batch_size,
        max_input_len=min(options.max_input_len, spec.max_kv_cache_capacity - num_drafts),
        max_kv_cache_capacity=spec.max_kv_cache_capacity,
        max_verify_tree_size=spec.max_verify,
        max_draft_tree_size=num_drafts,
        num_speculative_tokens=num_drafts,
        vocab_size=model.config.vocab_size,
    )


def _bundle(
    model_dir: Path, model: Model, spec: EngineSpec, library: Library, architecture: str, cache_dir: Path
) -> tuple[Bundle, bool]:
    key = BundleKey.of(model_dir, spec, library, architecture)
    folder = key.folder(cache_dir.expanduser())
    num_networks = len(spec.segments(model, spec.reader()))
    make = compile_in_children(model_dir, spec, library, num_networks, folder.with_suffix(".log"))
    return ensure_bundle(cache_dir.expanduser(), key, make)


def _drafting(model: Model, options: EngineOptions) -> SpeculativeConfig:
    if model.mtp is None:
        return SpeculativeConfig(0)
    return options.speculative or SpeculativeConfig(DEFAULT_DRAFTS)


def _method(model: Model, spec: EngineSpec) -> str:
    if model.mtp is None:
        return f"off: {model.no_mtp_reason}"
    return "mtp" if spec.max_verify > 1 else "off: num_speculative_tokens is 0"


def _require_room(plan: MemoryPlan, cuda: Cuda) -> None:
    free, total = cuda.memory()
    if plan.total_bytes > free:
        raise CapacityError(
            f"this engine needs {plan.total_bytes / 2**30:.2f} GiB ({plan.describe()}) and the GPU has"
            f" {free / 2**30:.2f} of {total / 2**30:.2f} GiB free: fewer slots, a shorter max_kv_cache_capacity or"
            " fewer drafts need less (`edgellm-worker plan MODEL` prints a table)"
        )
