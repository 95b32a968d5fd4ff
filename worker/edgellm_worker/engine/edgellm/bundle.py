"""What the vendor's builder left in a bundle folder: files, limits, KV dtypes, weight bindings.

    drafted   spec_base.engine  base_config.json   spec_draft.engine  draft_config.json
    plain     llm.engine        config.json

The limits are the *built* ones: the vendor's builder fills what a command line left out with defaults of its own, so
nothing is taken from the request that led to the bundle. The three configuration files are the vendor's format
(0.11.0: builder/core/artifacts/runtime_config.py and external_weights.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgellm_worker.engine.api import EngineLimits
from edgellm_worker.engine.edgellm.rules import HEADROOM_SLACK
from edgellm_worker.engine.errors import BuildError

_DRAFTED_FILES: Final = ("spec_base.engine", "base_config.json", "spec_draft.engine", "draft_config.json")
_PLAIN_FILES: Final = ("llm.engine", "config.json")


@dataclass(frozen=True, slots=True)
class WeightBinding:
    """A weight that stays in the checkpoint: the engine input `engine_name`, and the tensors that the runtime reads
    for it. `dtype` is safetensors' name of the input's type.
    """

    engine_name: str
    checkpoint_keys: tuple[str, ...]
    source_layout: str
    dtype: str


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """One engine of a bundle. `kv_cache_dtype` is the vendor's spelling: "fp8" or "fp16"."""

    role: str
    kv_cache_dtype: str
    bindings: tuple[WeightBinding, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tree sizes are 0 in a bundle without a draft."""

    path: Path
    base: BuiltModel
    draft: BuiltModel | None
    vocab_size: int
    max_input_len: int
    max_kv_cache_capacity: int
    max_batch_size: int
    max_verify_tree_size: int
    max_draft_tree_size: int

    @property
    def num_drafts(self) -> int:
        """Linear drafting verifies the last token and K drafts, so K is what both trees have room for."""
        return max(0, min(self.max_verify_tree_size - 1, self.max_draft_tree_size))

    def limits(self, num_drafts: int) -> EngineLimits:
        return EngineLimits(
            max_batch_size=self.max_batch_size,
            max_input_len=self.max_input_len,
            max_kv_cache_capacity=self.max_kv_cache_capacity - HEADROOM_SLACK,
            max_verify_tree_size=self.max_verify_tree_size,
            max_draft_tree_size=self.max_draft_tree_size,
            num_speculative_tokens=num_drafts,
            vocab_size=self.vocab_size,
        )


def read_bundle(path: Path) -> Bundle:
    """Raises `BuildError` naming the file and the field that is missing."""
    is_drafted = (path / "base_config.json").exists()
    for name in _DRAFTED_FILES if is_drafted else _PLAIN_FILES:
        if not (path / name).is_file():
            raise BuildError(f"{path} is no complete bundle of this engine: {name} is missing")
    base_file = path / ("base_config.json" if is_drafted else "config.json")
    base = _Config.read(base_file)
    draft = _Config.read(path / "draft_config.json") if is_drafted else None
    built = base.part("builder_config")
    return Bundle(
        path=path,
        base=_built_model("base", base),
        draft=None if draft is None else _built_model("draft", draft),
        vocab_size=base.number("vocab_size"),
        max_input_len=built.number("max_input_len"),
        max_kv_cache_capacity=built.number("max_kv_cache_capacity"),
        max_batch_size=built.number("max_batch_size"),
        max_verify_tree_size=built.number("max_verify_tree_size") if is_drafted else 0,
        max_draft_tree_size=0 if draft is None else draft.part("builder_config").number("max_draft_tree_size"),
    )


def _built_model(role: str, config: _Config) -> BuiltModel:
    bindings = config.fields.get("checkpoint_weight_bindings", [])
    return BuiltModel(role, config.text("kv_cache_dtype"), tuple(_binding(config, binding) for binding in bindings))


def _binding(config: _Config, fields: Mapping[str, Any]) -> WeightBinding:
    try:
        keys = tuple(fields["checkpoint_keys"])
        return WeightBinding(fields["engine_name"], keys, fields["source_layout"], fields["dtype"])
    except KeyError as error:
        raise BuildError(f"{config.where}: a weight binding has no {error}") from error


@dataclass(frozen=True, slots=True)
class _Config:
    """A JSON object and where it stands, for errors that say both."""

    where: str
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Config:
        try:
            fields = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BuildError(f"{path}: {error}") from error
        if not isinstance(fields, dict):
            raise BuildError(f"{path}: is no JSON object")
        return cls(str(path), fields)

    def part(self, name: str) -> _Config:
        return _Config(f"{self.where}: {name}", self._get(name, dict))

    def number(self, name: str) -> int:
        value: int = self._get(name, int)
        return value

    def text(self, name: str) -> str:
        value: str = self._get(name, str)
        return value

    def _get(self, name: str, kind: type) -> Any:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise BuildError(f"{self.where}: {name} is missing or no {kind.__name__}")
        return value
