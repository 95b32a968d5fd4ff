"""Checkpoint folders made to order: safetensors by hand, quantizers of our own, a small hybrid model with a draft.

The NVFP4 and FP8 encoders follow ModelOpt's; a test holds them against bytes that ModelOpt exported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edgellm_worker.engine.checkpoint.dtypes import DTYPES
from edgellm_worker.engine.checkpoint.layout import base_parts, mtp_parts
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.shard import open_shard
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.engine.models.config import read_config

Tensors = dict[str, np.ndarray]
UP = "model.layers.0.mlp.up_proj"
CODES = {dtype: name for name, dtype in DTYPES.items()}

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": True,
}


def header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header, position, data = {}, 0, []
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": CODES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + len(raw)],
        }
        position += len(raw)
        data.append(raw)
    path.write_bytes(header_bytes(header) + b"".join(data))


def read_shard(path: Path) -> Tensors:
    """All tensors of a file. (safetensors' numpy form knows no float8.)"""
    log = ProblemLog()
    shard = open_shard(path.parent, path.name, log)
    assert shard is not None, log.problems
    return {entry.name: shard.array(entry) for entry in shard.entries}


def encode_nvfp4(weight: np.ndarray, *, suffix: str = "weight_scale_2") -> Tensors:
    """ModelOpt's quantization with the weight's own maximum: round half to even in E2M1, scales clamped to E4M3."""
    values = weight.astype(np.float32)
    global_scale = np.float32(np.abs(values).max() / np.float32(E2M1_MAX * E4M3_MAX))
    blocks = values.reshape(len(values), -1, 16)
    scale = np.abs(blocks).max(axis=-1) / (np.float32(E2M1_MAX) * global_scale)
    scale[scale == 0] = 1.0
    scale = np.clip(scale, 2.0**-9, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    scaled = blocks / (scale.astype(np.float32) * global_scale)[..., None]
    magnitude = np.abs(scaled)
    codes = np.searchsorted(E2M1_BOUNDS, magnitude).astype(np.uint8)
    codes += np.isin(magnitude, E2M1_BOUNDS[[1, 3, 5]]).astype(np.uint8)
    codes |= (scaled < 0).astype(np.uint8) << 3
    codes = codes.reshape(len(values), -1)
    return {"weight": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale, suffix: global_scale}


def encode_compressed(weight: np.ndarray) -> Tensors:
    """The same values in compressed-tensors' layout: other names, and the global scale as its reciprocal."""
    parts = encode_nvfp4(weight)
    return {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": np.array([1 / parts["weight_scale_2"]], np.float32),
        "input_global_scale": np.array([8.0], np.float32),
    }


def encode_fp8(weight: np.ndarray) -> Tensors:
    values = weight.astype(np.float32)
    scale = np.float32(np.abs(values).max() / np.float32(E4M3_MAX))
    return {
        "weight": (values / scale).astype(ml_dtypes.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": np.float32(0.5),
    }


Encoder = Callable[[np.ndarray], Tensors]


def plain_tensors(config: Mapping[str, Any] = CONFIG, prefix: str = "model.", *, seed: int = 0) -> Tensors:
    """Random BF16 tensors of every part of a model."""
    rng = np.random.default_rng(seed)
    parsed = read_config(config)
    tensors = {}
    for part in (*base_parts(parsed), *(mtp_parts(parsed) if parsed.num_mtp_layers else ())):
        full = ("mtp." if part.namespace == "mtp" else "" if part.name == "lm_head" else prefix) + part.name
        values = rng.standard_normal(part.shape, dtype=np.float32) * 0.05
        tensors[f"{full}.weight" if part.is_linear else full] = values.astype(ml_dtypes.bfloat16)
    return tensors


def quantize(tensors: Tensors, modules: Iterable[str], encode: Encoder) -> Tensors:
    """`tensors` with these modules' weights replaced by what the encoder makes of them."""
    result = dict(tensors)
    for module in modules:
        for leaf, value in encode(result.pop(f"{module}.weight")).items():
            result[f"{module}.{leaf}"] = np.asarray(value)
    return result


def linears(tensors: Mapping[str, np.ndarray], *words: str) -> list[str]:
    """Module names that hold a matrix and contain one of the words, in the files' spelling."""
    names = [name.removesuffix(".weight") for name, value in tensors.items() if value.ndim == 2]
    kept = (name for name in names if "embed_tokens" not in name)
    return [name for name in kept if any(word in name for word in words)]


@dataclass
class FolderMaker:
    """A checkpoint folder under construction; every field may be changed before `write`."""

    path: Path
    config: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(CONFIG)))
    tensors: Tensors = field(default_factory=plain_tensors)
    quant: dict[str, Any] | None = None
    files: dict[str, list[str]] | None = None

    def write(self) -> Path:
        """One shard, or the shards of `files` (file -> tensor names) with an index."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        if self.quant is not None:
            document = {"producer": {"name": "modelopt"}, "quantization": self.quant}
            (self.path / "hf_quant_config.json").write_text(json.dumps(document))
        if self.files is None:
            write_shard(self.path / "model.safetensors", self.tensors)
            return self.path
        for file, names in self.files.items():
            write_shard(self.path / file, {name: self.tensors[name] for name in names})
        weight_map = {name: file for file, names in self.files.items() for name in names}
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return self.path

    def split(self, count: int = 2) -> FolderMaker:
        names = list(self.tensors)
        self.files = {
            f"model-{number + 1:05d}-of-{count:05d}.safetensors": names[number::count] for number in range(count)
        }
        return self


def problems_of(maker: FolderMaker, *, write: bool = True) -> list[str]:
    """What opening it says, without the path. `write` False: of what lies there already."""
    if write:
        maker.write()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(maker.path)
    return [problem.removeprefix(f"{maker.path}: ") for problem in caught.value.problems]


def open_quick(maker: FolderMaker) -> Checkpoint:
    return open_checkpoint(maker.write())
