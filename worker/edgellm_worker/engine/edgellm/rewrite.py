"""`--rewrite-mtp bf16`: a copy of a checkpoint whose draft is unquantized.

The vendor's resolver reads an unquantized draft rightly under any base (misread.py). The copy holds

    shards without quantized `mtp.` tensors     hard links (copies across file systems)
    shards with some                            written again: base tensors byte for byte, draft weights as BF16
    the index, hf_quant_config.json, config.json   without what spoke of the draft's quantization, `mtp*` excluded
    everything else                             hard links

BF16 keeps 8 bits of significand: an E2M1 or E4M3 code times its scales in float32 is rounded once. The folder appears
under its name when it is complete, and holds a note with the digest of what it was made from.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.digest import content_digest
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.shard import Shard, TensorEntry, open_shard
from edgellm_worker.engine.checkpoint.weights import Array, Fp8Weight, Nvfp4Weight
from edgellm_worker.engine.edgellm.misread import DRAFT_PREFIX
from edgellm_worker.engine.edgellm.safetensors_copy import Outgoing, write_safetensors
from edgellm_worker.engine.errors import CheckpointError

NOTE: Final = "edgellm_rewrite.json"
_INDEX: Final = "model.safetensors.index.json"
_QUANT_CONFIG: Final = "hf_quant_config.json"
_CONFIG: Final = "config.json"
_EXCLUDE: Final = "mtp*"
_NVFP4_BLOCK: Final = 16
_BF16: Final = np.dtype(ml_dtypes.bfloat16)
_WEIGHTS: Final = frozenset({"weight", "weight_packed"})
# Tensors that belong to a quantized weight and go with it. k_scale and v_scale stay: they are the KV cache's.
_SIDECARS: Final = frozenset(
    {"weight_scale", "weight_scale_2", "input_scale", "weight_global_scale", "input_global_scale"}
)


def rewrite_mtp(model_dir: Path, target: Path) -> Path:
    """Write the copy to `target` (kept as it is when it was made from the same content). Raises `CheckpointError`
    naming every tensor that cannot be taken, also when the draft is not quantized at all.
    """
    digest = content_digest(model_dir)
    if _was_made_from(target, digest):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".rewriting-", dir=target.parent))
    try:
        _write_copy(_Source.open(model_dir), staging)
        (staging / NOTE).write_text(json.dumps({"source": str(model_dir), "digest": digest, "draft": "bf16"}))
        if target.exists():
            raise CheckpointError([f"{target}: exists and was made from something else; remove it"])
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _was_made_from(target: Path, digest: str) -> bool:
    try:
        note = json.loads((target / NOTE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(note, dict) and note.get("digest") == digest


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint to copy. `tensors` maps a name to where it lies; `quantized` are draft modules to be decoded."""

    model_dir: Path
    shards: Mapping[str, Shard]
    tensors: Mapping[str, TensorEntry]
    quantized: frozenset[str]

    @classmethod
    def open(cls, model_dir: Path) -> _Source:
        problems = ProblemLog()
        shards = {
            path.name: shard
            for path in sorted(model_dir.glob("*.safetensors"))
            if (shard := open_shard(model_dir, path.name, problems)) is not None
        }
        if problems:
            raise CheckpointError([str(problem) for problem in problems.problems])
        tensors = {entry.name: entry for shard in shards.values() for entry in shard.entries}
        quantized = frozenset(
            name.removesuffix(".weight_scale")
            for name in tensors
            if name.startswith(DRAFT_PREFIX) and name.endswith(".weight_scale")
        )
        if not quantized:
            raise CheckpointError([f"{model_dir}: no tensor under {DRAFT_PREFIX} is quantized: nothing to rewrite"])
        return cls(model_dir, shards, tensors, quantized)

    def array(self, name: str) -> Array:
        entry = self.tensors[name]
        return self.shards[entry.file].array(entry)

    def scalar(self, name: str) -> np.float32:
        if name not in self.tensors:
            raise CheckpointError([f"{self.model_dir}: {name}: is missing"])
        if self.tensors[name].num_elements != 1:
            raise CheckpointError([f"{self.tensors[name].file}: {name}: has {self.tensors[name]}, one value expected"])
        return np.float32(self.array(name).reshape(()))

    def outgoing(self, entry: TensorEntry) -> Outgoing | None:
        """The tensor as the copy has it; None for what goes with a decoded weight."""
        module, _, kind = entry.name.rpartition(".")
        if module in self.quantized and kind in _SIDECARS:
            return None
        if module not in self.quantized or kind not in _WEIGHTS:
            return Outgoing(entry.name, entry.dtype, entry.shape, lambda: self.array(entry.name))
        shape, decode = self._decoder(module, entry)
        return Outgoing(f"{module}.weight", "BF16", shape, decode)

    def _decoder(self, module: str, entry: TensorEntry) -> tuple[tuple[int, ...], Callable[[], Array]]:
        scale = self.tensors[f"{module}.weight_scale"]
        if entry.dtype == "F8_E4M3" and scale.num_elements == 1:
            return entry.shape, lambda: self._fp8(module, entry.name)
        if entry.dtype == "U8" and len(entry.shape) == 2 and scale.shape == _block_shape(entry.shape):
            return (entry.shape[0], entry.shape[1] * 2), lambda: self._nvfp4(module, entry.name)
        message = f"{entry.file}: {entry.name}: {entry} with a scale of {scale} is neither FP8 per tensor nor NVFP4"
        raise CheckpointError([message])

    def _fp8(self, module: str, name: str) -> Array:
        return decode(Fp8Weight(self.array(name), self.scalar(f"{module}.weight_scale"))).astype(_BF16)

    def _nvfp4(self, module: str, name: str) -> Array:
        # compressed-tensors stores the global scale as its reciprocal.
        reciprocal = f"{module}.weight_global_scale"
        if reciprocal in self.tensors:
            global_scale = np.float32(1) / self.scalar(reciprocal)
        else:
            global_scale = self.scalar(f"{module}.weight_scale_2")
        weight = Nvfp4Weight(self.array(name), self.array(f"{module}.weight_scale"), global_scale)
        return decode(weight).astype(_BF16)


def _block_shape(packed_shape: tuple[int, ...]) -> tuple[int, int]:
    return packed_shape[0], packed_shape[1] * 2 // _NVFP4_BLOCK


def _write_copy(source: _Source, folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for file, shard in source.shards.items():
        outgoing = [out for entry in shard.entries if (out := source.outgoing(entry)) is not None]
        weight_map |= dict.fromkeys((out.name for out in outgoing), file)
        if any(entry.name.rpartition(".")[0] in source.quantized for entry in shard.entries):
            write_safetensors(folder / file, outgoing)
        else:
            _link(source.model_dir / file, folder / file)
    edits: Mapping[str, Callable[[dict[str, Any]], None]] = {
        _INDEX: lambda index: index.update(weight_map=weight_map),
        _QUANT_CONFIG: lambda config: _forget_draft(config.get("quantization", {})),
        _CONFIG: lambda config: _forget_draft(config.get("quantization_config", {})),
    }
    for path in _other_files(source):
        edit = edits.get(path.name)
        if edit is None:
            _link(path, folder / path.name)
            continue
        content = json.loads(path.read_text())
        edit(content)
        (folder / path.name).write_text(json.dumps(content, indent=2))


def _other_files(source: _Source) -> Iterator[Path]:
    return (path for path in sorted(source.model_dir.iterdir()) if path.is_file() and path.name not in source.shards)


def _forget_draft(quantization: dict[str, Any]) -> None:
    """Take the draft out of a quantization section: its per-module entries, and what patterns say of it."""
    if not quantization:
        return
    layers = quantization.get("quantized_layers")
    if layers is not None:
        quantization["quantized_layers"] = {m: v for m, v in layers.items() if not m.startswith(DRAFT_PREFIX)}
    key = "ignore" if "ignore" in quantization else "exclude_modules"
    excluded = [m for m in quantization.get(key) or [] if not fnmatch.fnmatch(m, _EXCLUDE)]
    quantization[key] = [*excluded, _EXCLUDE]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
