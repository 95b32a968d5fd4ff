"""The engine kind "edgellm": from a checkpoint and the operator's options to a running engine, by way of a bundle."""

from __future__ import annotations

from edgellm_worker.engine.api import Engine
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint
from edgellm_worker.engine.demands import KvCacheDtype, TreeSizes
from edgellm_worker.engine.edgellm.builder import BuiltBundle
from edgellm_worker.engine.edgellm.cache import BuildOptions
from edgellm_worker.engine.edgellm.command import build, describe
from edgellm_worker.engine.edgellm.open import EdgeLlmOptions, open_bundle
from edgellm_worker.engine.errors import DemandError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

DEFAULT_DRAFTS = 3


def open_engine(checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Build the bundle if the cache has none (minutes; `build` does it ahead of time), then load it.

    Raises `BuildError`, `CheckpointError`, `DemandError`, `EngineError`.
    """
    built = _built(checkpoint, options)
    drafting = build_options(options, has_draft=checkpoint.draft is not None)
    return open_bundle(EdgeLlmOptions(built.bundle.path, built.model_dir, drafting.num_speculative_tokens))


def build_bundle(checkpoint: Checkpoint, options: EngineOptions) -> str:
    """What the `build` command does for this engine."""
    return describe(_built(checkpoint, options))


def _built(checkpoint: Checkpoint, options: EngineOptions) -> BuiltBundle:
    return build(
        checkpoint.path,
        options.cache_dir.expanduser(),
        build_options(options, has_draft=checkpoint.draft is not None),
        rewrites_mtp=options.rewrites_mtp,
    )


def build_options(options: EngineOptions, *, has_draft: bool) -> BuildOptions:
    """Raises `DemandError` for a draft length that is to change while running: the runtime's is fixed when it loads."""
    drafting = options.speculative or SpeculativeConfig(DEFAULT_DRAFTS if has_draft else 0)
    if drafting.schedule or drafting.adaptive:
        raise DemandError("speculative-config: this runtime's draft length is fixed; give num_speculative_tokens alone")
    if options.quantization or options.kv_cache_dtype is not KvCacheDtype.AUTO:
        raise DemandError("quantization, kv-cache-dtype: the vendor's builder follows the checkpoint; leave them out")
    trees = TreeSizes.of(drafting.num_speculative_tokens, options.max_verify_tree_size, options.max_draft_tree_size)
    return BuildOptions(
        num_speculative_tokens=drafting.num_speculative_tokens,
        max_batch_size=options.max_batch_size,
        max_input_len=options.max_input_len,
        max_kv_cache_capacity=options.max_kv_cache_capacity,
        corrects_feedback=options.corrects_draft_feedback,
        accepts_fp16_kv=options.accepts_fp16_kv,
        verify_tree=trees.max_verify_tree_size,
        draft_tree=trees.max_draft_tree_size,
    )
