"""The engine kind "tensorrt": the speculative loop over a GPU, its networks from a bundle that is built when needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgellm_worker.engine.api import Engine, EngineLimits, EngineTraits
from edgellm_worker.engine.build import soundness
from edgellm_worker.engine.build.builder import collecting_logger
from edgellm_worker.engine.build.bundle import Bundle, BundleKey, compile_in_children, ensure_bundle
from edgellm_worker.engine.build.canary import Canary, rounding_margin
from edgellm_worker.engine.build.canary import check as check_canary
from edgellm_worker.engine.build.choice import Machine, drafting_of, engine_spec, trees_of
from edgellm_worker.engine.build.plan import MemoryPlan, plan_memory
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint
from edgellm_worker.engine.errors import CapacityError, EngineError, NetworkRefused
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.grammar import GrammarCompiler
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine, SpeculativeOptions
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from edgellm_worker.engine.runtime.tensorrt_program import Engines
from edgellm_worker.engine.trt import Library, load_library

NAME: Final = "tensorrt"

_log = logging.getLogger(__name__)


def open_engine(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Build the bundle if the cache has none (`build` does it ahead of time), then load it.

    Raises `BuildError`, `CapacityError`, `CheckpointError`, `DemandError`, `EngineError`.
    """
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    trees_of(model, options)  # what contradicts itself does so on every machine
    library = load_library()
    cuda = Cuda()
    try:
        machine = Machine(library, cuda.architecture)
        spec = engine_spec(model, checkpoint.base.kv.scheme, options, machine)
        _require_room(plan_memory(model, spec), cuda)
        bundle, _, spec = _bundle(checkpoint.path, model, spec, machine, options.cache_dir)
        engines = _loaded(bundle, library, cuda)
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
    try:
        loop = _loop_maker(checkpoint, model, spec, options, executor, f"{NAME} ({library.name}, {cuda.name})")
        executor.warm_up(drafting_of(model, options).draft_lengths)
        # In a loop of its own: what the check's rounds took tells an adaptive draft length nothing.
        _check(loop(), bundle.canary, checkpoint.path, is_quantized=spec.runs_fp8 or spec.runs_fp4)
        return loop()
    except BaseException:
        executor.close()
        raise


def _loop_maker(
    checkpoint: Checkpoint,
    model: Model,
    spec: EngineSpec,
    options: EngineOptions,
    executor: TensorRtExecutor,
    name: str,
) -> Callable[[], SpeculativeEngine]:
    drafting = drafting_of(model, options)
    num_drafts = drafting.num_speculative_tokens
    traits = EngineTraits(
        name=name,
        in_flight=True,
        seeded=True,
        drafts_when_sampled=num_drafts > 0,
        speculative_method=_method(model, drafting),
    )
    limits = engine_limits(model, spec, options, num_drafts)
    grammars = GrammarCompiler(checkpoint.path / "tokenizer.json", model.config.vocab_size)

    def make() -> SpeculativeEngine:
        chosen = drafting.draft_length()
        return SpeculativeEngine(
            executor, SpeculativeOptions(limits, traits, chosen, options.prefill_chunk_tokens, grammars)
        )

    return make


def build_bundle(checkpoint: Checkpoint, options: EngineOptions) -> str:
    """What the `build` command does for this engine."""
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    trees_of(model, options)
    library = load_library()
    with Cuda() as cuda:
        machine = Machine(library, cuda.architecture)
    spec = engine_spec(model, checkpoint.base.kv.scheme, options, machine)
    bundle, was_cached, _ = _bundle(checkpoint.path, model, spec, machine, options.cache_dir)
    state = "already built" if was_cached else "built"
    size = sum(map(len, bundle.plans.values()))
    return f"{bundle.path}: {state}, {len(bundle.plans)} networks, {size / 1e6:.1f} MB ({machine})"


def engine_limits(model: Model, spec: EngineSpec, options: EngineOptions, num_drafts: int) -> EngineLimits:
    return EngineLimits(
        max_batch_size=spec.max_batch_size,
        max_input_len=min(options.max_input_len, spec.max_kv_cache_capacity - num_drafts),
        max_kv_cache_capacity=spec.max_kv_cache_capacity,
        max_verify_tree_size=spec.max_verify,
        max_draft_tree_size=spec.max_draft_tree_size,
        num_speculative_tokens=num_drafts,
        vocab_size=model.config.vocab_size,
    )


def _bundle(
    model_dir: Path, model: Model, spec: EngineSpec, machine: Machine, cache_dir: Path
) -> tuple[Bundle, bool, EngineSpec]:
    """-> (bundle, whether it was there, what it is of). A library that refuses quantized products, though its release
    should have them, gets none: their weights run in our kernel then, at their own bytes too.
    """
    try:
        return *_bundle_of(model_dir, model, spec, machine, cache_dir), spec
    except NetworkRefused as error:
        if not (spec.runs_fp8 or spec.runs_fp4):
            raise
        reason, *_, note = str(error).split("\n")
        _log.warning("quantized weights do not run in the library's networks: %s %s", reason, note)
    narrowed = replace(spec, runs_fp8=False, runs_fp4=False)
    return *_bundle_of(model_dir, model, narrowed, machine, cache_dir), narrowed


def _bundle_of(
    model_dir: Path, model: Model, spec: EngineSpec, machine: Machine, cache_dir: Path
) -> tuple[Bundle, bool]:
    networks = spec.segments(model, spec.reader(has_values=False)).keys()
    key = BundleKey.of(model_dir, spec, machine.library, machine.architecture, networks)
    folder = key.folder(cache_dir.expanduser())
    make = compile_in_children(model_dir, spec, machine.library, len(networks), folder.with_suffix(".log"))
    return ensure_bundle(cache_dir.expanduser(), key, make)


def _loaded(bundle: Bundle, library: Library, cuda: Cuda) -> Engines:
    """Raises `EngineError` for a plan that its own library does not read, under a driver of another release perhaps."""
    engines = Engines(library, cuda, collecting_logger(library))
    try:
        engines.load(bundle.plans)
    except EngineError as error:
        raise EngineError(f"{error}; remove {bundle.path} to build it again") from error
    return engines


def _check(engine: Engine, canary: Canary | None, model_dir: Path, *, is_quantized: bool) -> None:
    """Before the first job. Raises `EngineError` where this engine does not compute its model."""
    if canary is not None:
        check_canary(engine, canary, is_quantized=is_quantized)
    elif (text := soundness.text_ids(model_dir)) is not None:
        soundness.check(engine, text, margin=rounding_margin(is_quantized=is_quantized))


def _method(model: Model, drafting: SpeculativeConfig) -> str:
    if model.mtp is None:
        return f"off: {model.no_mtp_reason}"
    return "mtp" if drafting.num_speculative_tokens else "off: num_speculative_tokens is 0"


def _require_room(plan: MemoryPlan, cuda: Cuda) -> None:
    free, total = cuda.memory()
    if plan.total_bytes > free:
        raise CapacityError(
            f"this engine needs {plan.total_bytes / 2**30:.2f} GiB ({plan.describe()}) and the GPU has"
            f" {free / 2**30:.2f} of {total / 2**30:.2f} GiB free: fewer slots, a shorter max_kv_cache_capacity or"
            " fewer drafts need less (`edgellm-worker plan MODEL` prints a table)"
        )
