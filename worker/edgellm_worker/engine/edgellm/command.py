"""What `build --engine edgellm` does, for the command line to call."""

from __future__ import annotations

from pathlib import Path

from edgellm_worker.engine.checkpoint.digest import content_digest
from edgellm_worker.engine.edgellm.builder import BuiltBundle, build_bundle
from edgellm_worker.engine.edgellm.cache import BuildOptions
from edgellm_worker.engine.edgellm.misread import read_facts
from edgellm_worker.engine.edgellm.rewrite import rewrite_mtp


def build(model_dir: Path, cache_dir: Path, options: BuildOptions, *, rewrites_mtp: bool = False) -> BuiltBundle:
    """`rewrites_mtp` is `--rewrite-mtp bf16`. Raises `CheckpointError` and `BuildError`."""
    if rewrites_mtp:
        copy = cache_dir / "edgellm" / "checkpoints" / f"{model_dir.name}-mtp-bf16-{content_digest(model_dir)[:16]}"
        model_dir = rewrite_mtp(model_dir, copy)
    return build_bundle(read_facts(model_dir), cache_dir, options)


def describe(built: BuiltBundle) -> str:
    """The end of the command's output: where the bundle is, and what is in it as audited."""
    bundle = built.bundle
    lines = [
        f"bundle {bundle.path}{' (from the cache)' if built.was_cached else ''}",
        f"model {built.model_dir}",
        f"rows {bundle.max_batch_size}, input {bundle.max_input_len}, capacity {bundle.max_kv_cache_capacity}",
        f"drafts {bundle.num_drafts}",
        f"KV cache {bundle.base.kv_cache_dtype}; hidden state between drafts: {built.feedback}",
    ]
    return "\n".join(lines)
