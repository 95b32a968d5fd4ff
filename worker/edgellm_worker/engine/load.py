"""From a kind's name to an engine. What a kind needs is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final, cast

from edgellm_worker.engine.api import Engine
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint
from edgellm_worker.engine.demands import KvCacheDtype, WeightForm
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the operator asks of any engine. Lengths in tokens.

    speculative            None: what the checkpoint can do, three drafts a step where it has MTP
    max_verify_tree_size, max_draft_tree_size    None: as drafting needs (engine/demands.py)
    quantization           forms in which weights must run; none: as the checkpoint and the machine have it
    prefill_chunk_tokens   most prompt tokens read in one step, between two rounds of the running rows
    cache_dir              where engines that are built keep their bundles
    rewrites_mtp, corrects_draft_feedback, accepts_fp16_kv     the edgellm engine's builds (engine/edgellm/cache.py)
    """

    max_batch_size: int = 4
    max_input_len: int = 1024
    max_kv_cache_capacity: int = 2048
    speculative: SpeculativeConfig | None = None
    max_verify_tree_size: int | None = None
    max_draft_tree_size: int | None = None
    quantization: frozenset[WeightForm] = frozenset()
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    prefill_chunk_tokens: int = 128
    cache_dir: Path = Path("~/.cache/edgellm-worker")
    rewrites_mtp: bool = False
    corrects_draft_feedback: bool = True
    accepts_fp16_kv: bool = False


EngineOpener = Callable[[Checkpoint, EngineOptions], Engine]

KINDS: Final = {
    "edgellm": "edgellm_worker.engine.edgellm.kind",
    "reference": "edgellm_worker.engine.runtime.reference",
    "tensorrt": "edgellm_worker.engine.runtime.tensorrt_engine",
}
"""The module of each kind; it has `open_engine`, an `EngineOpener`."""


def load_engine(kind: str, checkpoint: Checkpoint, options: EngineOptions) -> Engine:
    """Raises `BuildError` (no such kind, or it is not installed), `CheckpointError`, `CapacityError`, `DemandError`."""
    with _files_of_the_build():
        return cast("EngineOpener", _module(kind).open_engine)(checkpoint, options)


def build_engine(kind: str, checkpoint: Checkpoint, options: EngineOptions) -> str:
    """Build ahead of time what `load_engine` would build, and say in words what there is now. A kind that builds has
    `build_bundle(checkpoint, options) -> str`. Raises as `load_engine`.
    """
    build = getattr(_module(kind), "build_bundle", None)
    if build is None:
        return f"engine {kind} runs from the checkpoint: there is nothing to build"
    with _files_of_the_build():
        return cast("Callable[[Checkpoint, EngineOptions], str]", build)(checkpoint, options)


@contextmanager
def _files_of_the_build() -> Iterator[None]:
    """A cache that cannot be written (read-only, full, of another user) is a failed build like any other."""
    try:
        yield
    except OSError as error:
        raise BuildError(f"{error.filename or 'a file'}: {error.strerror or error}") from error


def _module(kind: str) -> ModuleType:
    if kind not in KINDS:
        raise BuildError(f"no engine is called {kind!r}; there are {', '.join(sorted(KINDS))}")
    try:
        return import_module(KINDS[kind])
    except ImportError as error:
        raise BuildError(f"engine {kind!r} is not installed here: {error}") from error
