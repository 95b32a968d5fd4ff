"""Weights with shapes and no values: a whole model of any size for networks whose weights are inputs."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, KvScales, Nvfp4Weight, Weight
from edgellm_worker.engine.models.config import ModelConfig

Scheme = Callable[[str], str]
"""From a module's name to "dense", "fp8", "fp8 weight-only", "nvfp4" or "w4a16"."""


def everywhere(scheme: str) -> Scheme:
    """Every projection but the small gates of Gated DeltaNet and the head."""
    return lambda name: "dense" if name.rpartition(".")[2] in {"in_proj_a", "in_proj_b", "lm_head"} else scheme


class ShapeSource:
    """`WeightSource`; every array is one broadcast zero."""

    def __init__(self, config: ModelConfig, scheme: Scheme) -> None:
        self._shapes = module_shapes(config)
        self._scheme = scheme
        self._has_mtp = config.num_mtp_layers > 0

    def weight(self, name: str) -> Weight:
        shape = self._shapes[name.rpartition(".")[2]]
        if len(shape) != 2 or name == "embed_tokens":
            return DenseWeight(_zeros(shape, np.float16))
        return _MAKE[self._scheme(name)](*shape)

    def array(self, name: str) -> DenseWeight:
        return DenseWeight(_zeros(self._shapes[name.rpartition(".")[2]], np.float32))

    def has(self, name: str) -> bool:
        return self._has_mtp and name == "fc.weight"

    def kv_scales(self, layer: int) -> KvScales:
        return KvScales(np.float32(1), np.float32(1))


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """[out, in] by the last part of a module's name."""
    hidden, inner, attention = config.hidden_size, config.intermediate_size, config.attention
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (q * (2 if attention.is_gated else 1), hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "fc": (hidden, 2 * hidden),
        "q_norm": (attention.head_dim,),
        "k_norm": (attention.head_dim,),
    }
    norms = ("input_layernorm", "post_attention_layernorm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes.update(dict.fromkeys(norms, (hidden,)))
    delta = config.delta_net
    shapes["norm"] = (hidden,)
    if delta is not None:
        value = delta.num_value_heads * delta.value_dim
        shapes |= {
            "in_proj_qkv": (delta.num_channels, hidden),
            "in_proj_z": (value, hidden),
            "in_proj_a": (delta.num_value_heads, hidden),
            "in_proj_b": (delta.num_value_heads, hidden),
            "out_proj": (hidden, value),
            "conv1d": (delta.num_channels, 1, delta.conv_kernel),
            "A_log": (delta.num_value_heads,),
            "dt_bias": (delta.num_value_heads,),
        }
    return shapes


def _zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _fp8(out: int, width: int, input_scale: np.float32 | None) -> Fp8Weight:
    return Fp8Weight(_zeros((out, width), ml_dtypes.float8_e4m3fn), np.float32(1), input_scale)


def _nvfp4(out: int, width: int, input_scale: np.float32 | None) -> Nvfp4Weight:
    blocks = _zeros((out, width // 16), ml_dtypes.float8_e4m3fn)
    return Nvfp4Weight(_zeros((out, width // 2), np.uint8), blocks, np.float32(1), input_scale)


_MAKE: dict[str, Callable[[int, int], Weight]] = {
    "dense": lambda out, width: DenseWeight(_zeros((out, width), np.float16)),
    "fp8": lambda out, width: _fp8(out, width, np.float32(0.5)),
    "fp8 weight-only": lambda out, width: _fp8(out, width, None),
    "nvfp4": lambda out, width: _nvfp4(out, width, np.float32(0.5)),
    "w4a16": lambda out, width: _nvfp4(out, width, None),
}
