"""Checkpoints of real shapes whose files are sparse: real headers and real scales, weights that are holes on the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_worker.engine.checkpoint.dtypes import DTYPES
from edgellm_worker.engine.checkpoint.layout import base_parts, mtp_parts
from edgellm_worker.engine.models.config import read_config
from tests.support.checkpoint_files import header_bytes

Tensor = tuple[str, tuple[int, ...]]  # dtype, shape
SCHEMES = {"FP8": "FP8", "NVFP4": "NVFP4", "W4A16_NVFP4": "W4A16"}
SHARD_BYTES = 5 * 10**9
SCALE = np.float32(0.01)


def stored(name: str, shape: tuple[int, ...], scheme: str | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one linear module as ModelOpt lays them out."""
    num_out, num_in = shape
    if scheme is None:
        yield f"{name}.weight", ("BF16", shape)
    elif scheme == "FP8":
        yield f"{name}.weight", ("F8_E4M3", shape)
        yield f"{name}.weight_scale", ("F32", ())
        yield f"{name}.input_scale", ("F32", ())
    else:
        yield f"{name}.weight", ("U8", (num_out, num_in // 2))
        yield f"{name}.weight_scale", ("F8_E4M3", (num_out, num_in // 16))
        yield f"{name}.weight_scale_2", ("F32", ())
        if scheme == "NVFP4":
            yield f"{name}.input_scale", ("F32", ())


def model_tensors(config: Mapping[str, Any], quantized: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Every tensor of the model that `config` describes; `quantized` is a `quantized_layers` table, or empty."""
    parsed = read_config(config)
    tensors: dict[str, Tensor] = {}
    for part in (*base_parts(parsed), *(mtp_parts(parsed) if parsed.num_mtp_layers else ())):
        full = ("mtp." if part.namespace == "mtp" else "" if part.name == "lm_head" else prefix) + part.name
        if part.is_linear:
            algorithm = quantized.get(full, {}).get("quant_algo")
            tensors |= stored(full, part.shape, SCHEMES.get(algorithm))
        else:
            tensors[full] = ("BF16", part.shape)
    return tensors


def write_sparse(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Shards of about 5 GB with an index; scalars are written, everything else is a hole."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _num_bytes(tensor)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        _write_shard(folder / file, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _num_bytes(tensor: Tensor) -> int:
    return DTYPES[tensor[0]].itemsize * math.prod(tensor[1])


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        stop = position + _num_bytes((dtype, shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    head = header_bytes(header)
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(len(head) + position)
        for entry in header.values():
            if not entry["shape"]:
                stream.seek(len(head) + entry["data_offsets"][0])
                stream.write(SCALE.tobytes())
