"""`build --engine edgellm`: the vendor's builder in a child process, then an audit of what it built.

    probe (child) ─▶ cache hit? ─▶ audit ─▶ done
                        │ no
                        ▼
    misread? refuse ─▶ build into .building-* (child) ─▶ audit ─▶ manifest ─▶ rename

The builder runs in a child because it holds gigabytes, may crash, and is changed in place by the one correction
(feedback.py). Its defaults are never relied on: verification for K drafts gets K+1 positions, where the vendor's own
default of 60 costs that many copies of the recurrent state per row.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgellm_worker.engine.builders import builder_failure, locked, log_tail
from edgellm_worker.engine.checkpoint.digest import content_digest
from edgellm_worker.engine.edgellm.audit import audit
from edgellm_worker.engine.edgellm.builder_child import EXIT_NO_PLACE_FOR_CORRECTION, EXIT_UNSUPPORTED_MACHINE
from edgellm_worker.engine.edgellm.bundle import Bundle, read_bundle
from edgellm_worker.engine.edgellm.cache import (
    MANIFEST,
    BuildOptions,
    BuildWorld,
    bundle_key,
    bundle_path,
    read_manifest,
)
from edgellm_worker.engine.edgellm.misread import ModelFacts, refuse_misread
from edgellm_worker.engine.edgellm.native import DISTRIBUTION, package_version
from edgellm_worker.engine.errors import BuildError, DemandError

_CHILD_MODULE: Final = "edgellm_worker.engine.edgellm.builder_child"


@dataclass(frozen=True, slots=True)
class BuiltBundle:
    """`feedback` says what became of the draft's hidden-state output; `was_cached` that nothing was built."""

    bundle: Bundle
    model_dir: Path
    feedback: str
    was_cached: bool


def build_bundle(model: ModelFacts, cache_dir: Path, options: BuildOptions) -> BuiltBundle:
    """Raises `BuildError` (package, machine, builder, audit), `CheckpointError` (the vendor would misread it) and
    `DemandError` (drafts without an MTP layer).
    """
    version = package_version()
    if options.num_speculative_tokens and not model.has_draft:
        raise DemandError(f"{model.model_dir} has no MTP layer: build with num_speculative_tokens 0")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=cache_dir) as scratch:
        found = _run_child({"action": "probe"}, Path(scratch) / "probe.log")
    world = BuildWorld(version, found["tensorrt"], found["gpu"])
    key = bundle_key(world, options, content_digest(model.model_dir))
    target = bundle_path(cache_dir, world, key)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock")):
        manifest = read_manifest(target, key)
        was_cached = manifest is not None
        if manifest is None:
            if options.num_speculative_tokens:
                refuse_misread(model)
            manifest = _build(model, options, target, key)
        bundle = read_bundle(target)
        audit(bundle, options, model)
    return BuiltBundle(bundle, model.model_dir, manifest["feedback"], was_cached)


def builder_argv(model_dir: Path, engine_dir: Path, options: BuildOptions) -> list[str]:
    """Arguments of the vendor's builder, none left to its defaults."""
    argv = {
        "--model-dir": model_dir,
        "--engine-dir": engine_dir,
        "--components": "llm",
        "--dense": "auto",
        "--spec-type": "mtp" if options.num_speculative_tokens else "none",
        "--max-input-len": options.max_input_len,
        "--max-kv-cache-capacity": options.max_kv_cache_capacity,
        "--max-batch-size": options.max_batch_size,
    }
    if options.num_speculative_tokens:
        argv["--max-verify-tree-size"] = options.max_verify_tree_size
        argv["--max-draft-tree-size"] = options.max_draft_tree_size
    return [str(part) for pair in argv.items() for part in pair]


def _build(model: ModelFacts, options: BuildOptions, target: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    log = target.with_suffix(".log")
    staging = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        argv = builder_argv(model.model_dir, staging, options)
        corrects = options.corrects_feedback and options.num_speculative_tokens > 0
        order = {"action": "build", "argv": argv, "corrects_feedback": corrects}
        answer = _run_child(order, log)
        audit(read_bundle(staging), options, model)
        manifest = {"key": key, "feedback": answer["feedback"], "model_dir": str(model.model_dir), "argv": argv}
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def _run_child(order: Mapping[str, Any], log: Path) -> dict[str, str]:
    """Run `builder_child` and return its answer. Raises `BuildError` with the log's last lines."""
    result = log.with_suffix(".result")
    command: Sequence[str] = [sys.executable, "-m", _CHILD_MODULE, str(result)]
    with log.open("wb") as output:
        done = subprocess.run(
            command, input=json.dumps(order).encode(), stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode == 0:
        answer: dict[str, str] = json.loads(result.read_text())
        result.unlink()
        return answer
    if done.returncode == EXIT_UNSUPPORTED_MACHINE:
        raise BuildError(f"{DISTRIBUTION} does not support this machine: {log_tail(log).splitlines()[-1]}")
    if done.returncode == EXIT_NO_PLACE_FOR_CORRECTION:
        message = (
            "this version of the vendor's builder has no place for the correction of the draft's hidden state; "
            f"build with --no-correct-draft-feedback to take its drafts as they are\n{log_tail(log)}"
        )
        raise BuildError(message)
    raise builder_failure("the vendor's builder", done.returncode, log)
