"""From a bundle to an engine of the vendor's runtime.

What is asked for and what the installed runtime can do decide between the two engines:

    bundle     runtime seats drafted rows in flight   engine
    drafted    no (0.11.0)                            StaticEngine, drafting
    drafted    yes                                    InFlightEngine, drafting
    plain      -                                      InFlightEngine where the runtime has it, else StaticEngine

Its calls are known to hang and to leak: run it behind the engine child's handle (engine/child), which has the
watchdog. `EdgeLlmRules` gives the parent process what it needs to check and group jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgellm_worker.engine.api import Engine, EngineTraits
from edgellm_worker.engine.edgellm.bundle import Bundle, read_bundle
from edgellm_worker.engine.edgellm.in_flight import InFlightEngine, LoadedRequestEngine
from edgellm_worker.engine.edgellm.native import Capabilities, detect, load_native
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.edgellm.static import LoadedRuntime, StaticEngine
from edgellm_worker.engine.errors import BuildError, EngineError

NAME: Final = "edgellm"
# Linear drafting: one candidate a step.
_DRAFT_TOP_K: Final = 1


@dataclass(frozen=True, slots=True)
class EdgeLlmOptions:
    """`model_dir` is the checkpoint that the bundle was built from: the runtime reads weights and tokenizer from it.

    num_speculative_tokens   drafts per round; None for what the bundle was built for, 0 asks for none
    counts_drafting          switch on the runtime's profiling, without which it keeps no drafting counters
    """

    bundle_dir: Path
    model_dir: Path
    num_speculative_tokens: int | None = None
    counts_drafting: bool = True


def open_bundle(options: EdgeLlmOptions, module: Any = None) -> Engine:
    """`module` is the vendor's native module; None loads it. Raises `BuildError` (package, machine, bundle),
    `CheckpointError` (tokenizer), `EngineError` (the runtime refuses to load).
    """
    bundle = read_bundle(options.bundle_dir)
    num_drafts = _num_drafts(bundle, options.num_speculative_tokens)
    prompts = PromptText(options.model_dir)
    native = load_native() if module is None else module
    capabilities = detect(native)
    limits = bundle.limits(num_drafts)
    loader = _Loader(native, bundle, options.model_dir, num_drafts)
    if capabilities.in_flight_drafting if num_drafts else capabilities.in_flight:
        return InFlightEngine(loader.request_engine(), limits, _traits(num_drafts, in_flight=True), prompts)
    if num_drafts and not capabilities.batched_drafting:
        raise BuildError("the installed runtime takes no draft settings; build a bundle without a draft")
    loaded = loader.runtime(capabilities, counts_drafting=options.counts_drafting)
    return StaticEngine(loaded, limits, _traits(num_drafts, in_flight=False), prompts)


def _traits(num_drafts: int, *, in_flight: bool) -> EngineTraits:
    """Not `seeded`: a row's seed is handed on, but that its text is the same in any batch is the runtime's promise to
    make, and it makes none.
    """
    return EngineTraits(
        name=NAME,
        in_flight=in_flight,
        seeded=False,
        drafts_when_sampled=False,
        speculative_method="mtp" if num_drafts else "off: the bundle was built without a draft",
    )


def _num_drafts(bundle: Bundle, wanted: int | None) -> int:
    if wanted is None or wanted == bundle.num_drafts:
        return bundle.num_drafts
    if not 1 <= wanted <= bundle.num_drafts:
        message = (
            f"num_speculative_tokens {wanted}: {bundle.path} was built for {bundle.num_drafts}; build another bundle"
        )
        raise BuildError(message)
    return wanted


@dataclass(frozen=True, slots=True)
class _Loader:
    """Constructs the vendor's objects, with the arguments that its own server passes."""

    module: Any
    bundle: Bundle
    model_dir: Path
    num_drafts: int

    def runtime(self, capabilities: Capabilities, *, counts_drafting: bool) -> LoadedRuntime:
        has_counters = bool(self.num_drafts) and capabilities.drafting_counters and counts_drafting
        self.module.set_profiling_enabled(has_counters)
        bundle_dir, model_dir = str(self.bundle.path), str(self.model_dir)
        cache = self.module.ContextCacheConfig()
        cache.enabled = False
        if self.num_drafts:
            verify_size = self.num_drafts + 1
            draft = (_DRAFT_TOP_K, self.num_drafts, verify_size)
            # A native MTP draft is part of the checkpoint: a draft folder of its own is refused.
            arguments: tuple[Any, ...] = (bundle_dir, "", {}, *draft, model_dir, "", cache, 0)
        else:
            arguments = (bundle_dir, "", {}, model_dir, cache)
        try:
            runtime = self.module.LLMRuntime(*arguments)
        except RuntimeError as error:
            raise EngineError(f"the runtime cannot load {bundle_dir}: {error}") from error
        runtime.capture_decoding_cuda_graph()
        return LoadedRuntime(self.module, runtime, self.num_drafts, has_counters)

    def request_engine(self) -> LoadedRequestEngine:
        bundle_dir = str(self.bundle.path)
        draft: dict[str, int] = {}
        if self.num_drafts:
            draft = {
                "draft_top_k": _DRAFT_TOP_K,
                "draft_step": self.num_drafts,
                "verify_tree_size": self.num_drafts + 1,
            }
        try:
            native = self.module.RequestEngine(
                bundle_dir, checkpoint_dir=str(self.model_dir), max_batch_size=self.bundle.max_batch_size, **draft
            )
        except RuntimeError as error:
            raise EngineError(f"the runtime cannot load {bundle_dir}: {error}") from error
        return LoadedRequestEngine(self.module, native, self.num_drafts)
