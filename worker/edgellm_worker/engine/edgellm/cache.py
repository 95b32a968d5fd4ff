"""Where a bundle lies, and when one may be used again.

    <cache>/edgellm/<package>-<version>_tensorrt-<version>_<gpu>/<digest>/     a finished bundle and its manifest
                                                              /<digest>.log    what its builder said
                                                              /.building-*     unfinished, never read

The vendor's own cache key holds neither package version, TensorRT version nor GPU, and it does not know of a corrected
builder: bundles of different worlds would be taken for each other. The digest covers what the vendor's key covers
(checkpoint content and every build option, tree sizes among them) and the correction.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from edgellm_worker.engine.errors import BuildError

MANIFEST: Final = "edgellm_worker.json"
LAYOUT_VERSION: Final = 1

# Options that change nothing in the bundle, or have an entry of their own in the key.
_NOT_BUILT: Final = frozenset({"accepts_fp16_kv", "corrects_feedback", "verify_tree", "draft_tree"})


@dataclass(frozen=True, slots=True)
class BuildWorld:
    """What a bundle's fitness depends on besides its options."""

    package_version: str
    tensorrt_version: str
    gpu: str

    @property
    def folder_name(self) -> str:
        return f"tensorrt-edgellm-{self.package_version}_tensorrt-{self.tensorrt_version}_{self.gpu}"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """`num_speculative_tokens` 0 builds without a draft. `corrects_feedback`: see feedback.py. `accepts_fp16_kv`: an
    FP8 claim that the vendor does not follow is no fault of the bundle (audit.py). Tree sizes that are None are what a
    chain of drafts needs.
    """

    num_speculative_tokens: int = 3
    max_batch_size: int = 4
    max_input_len: int = 4096
    max_kv_cache_capacity: int = 8192
    corrects_feedback: bool = True
    accepts_fp16_kv: bool = False
    verify_tree: int | None = None
    draft_tree: int | None = None

    @property
    def max_verify_tree_size(self) -> int:
        if not self.num_speculative_tokens:
            return 0
        return self.num_speculative_tokens + 1 if self.verify_tree is None else self.verify_tree

    @property
    def max_draft_tree_size(self) -> int:
        if not self.num_speculative_tokens or self.draft_tree is None:
            return self.num_speculative_tokens
        return self.draft_tree


def bundle_key(world: BuildWorld, options: BuildOptions, checkpoint_digest: str) -> dict[str, Any]:
    return {
        "layout_version": LAYOUT_VERSION,
        "world": asdict(world),
        "options": {name: value for name, value in asdict(options).items() if name not in _NOT_BUILT},
        "max_verify_tree_size": options.max_verify_tree_size,
        "max_draft_tree_size": options.max_draft_tree_size,
        "draft_feedback": "after-norm" if options.corrects_feedback else "as-shipped",
        "checkpoint": checkpoint_digest,
    }


def bundle_path(cache_dir: Path, world: BuildWorld, key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir / "edgellm" / world.folder_name / digest


def read_manifest(bundle_dir: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished bundle with exactly this key, or None where there is none. Raises `BuildError` when
    the folder holds something else.
    """
    path = bundle_dir / MANIFEST
    if not bundle_dir.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BuildError(f"{bundle_dir} is a damaged bundle ({error}); remove the folder to build it again") from error
    if not isinstance(manifest, dict) or manifest.get("key") != key:
        raise BuildError(f"{bundle_dir} was built for something else; remove the folder to build it again")
    return manifest
