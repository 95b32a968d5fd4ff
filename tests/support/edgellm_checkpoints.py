"""Small Qwen3.5-shaped checkpoints in every quantization that matters here. Values are random, shapes and names are not.

Four base layers, the last (or every `interval`-th) with full attention, and one MTP layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from edgellm_worker.engine.edgellm.safetensors_copy import Outgoing, write_safetensors

HIDDEN, INTER, VOCAB, LAYERS = 64, 128, 256, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LINEAR_K, LINEAR_V, LINEAR_DIM = 2, 4, 16
BASE = "model.language_model."
MTP = "mtp.layers.0"
MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

Tensors = dict[str, np.ndarray]
Linear = Callable[[np.random.Generator, int, int], Tensors]

CODES = {np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}
CODES |= {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3"}


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)


def dense(rng: np.random.Generator, out: int, inp: int) -> Tensors:
    return {"weight": bf16(rng, out, inp)}


def fp8(rng: np.random.Generator, out: int, inp: int) -> Tensors:
    return {
        "weight": rng.integers(30, 60, (out, inp)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        "weight_scale": np.float32(0.003),
        "input_scale": np.float32(0.02),
    }


def nvfp4(rng: np.random.Generator, out: int, inp: int) -> Tensors:
    return {
        "weight": rng.integers(0, 256, (out, inp // 2)).astype(np.uint8),
        "weight_scale": rng.integers(40, 60, (out, inp // 16)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        "weight_scale_2": np.float32(0.01),
        "input_scale": np.float32(0.02),
    }


def module_names(interval: int = 4) -> list[str]:
    """Base modules that quantization applies to, full names."""
    names = [f"{BASE}layers.{i}.mlp.{m}" for i in range(LAYERS) for m in MLP]
    return names + [f"{BASE}layers.{i}.self_attn.{m}" for i in _full(interval) for m in ATTENTION]


def mtp_module_names() -> list[str]:
    return [f"{MTP}.mlp.{m}" for m in MLP] + [f"{MTP}.self_attn.{m}" for m in ATTENTION]


def _full(interval: int) -> list[int]:
    return [i for i in range(LAYERS) if (i + 1) % interval == 0]


def write_checkpoint(
    folder: Path,
    *,
    base: Linear = nvfp4,
    mtp: Linear = dense,
    interval: int = 4,
    has_kv_scales: bool = True,
    hf_quant: dict[str, Any] | None = None,
    embedded: dict[str, Any] | None = None,
    extra: Tensors | None = None,
) -> Path:
    """`hf_quant` becomes hf_quant_config.json's quantization, `embedded` config.json's quantization_config."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {
        f"{BASE}embed_tokens.weight": bf16(rng, VOCAB, HIDDEN),
        f"{BASE}norm.weight": bf16(rng, HIDDEN),
        "lm_head.weight": bf16(rng, VOCAB, HIDDEN),
        "mtp.fc.weight": bf16(rng, HIDDEN, 2 * HIDDEN),
        **{f"mtp.{n}.weight": bf16(rng, HIDDEN) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    }
    for i in range(LAYERS):
        prefix = f"{BASE}layers.{i}"
        tensors |= _norms(rng, prefix) | _mlp(rng, prefix, base)
        is_full = i in _full(interval)
        tensors |= _attention(rng, prefix, base) if is_full else _delta_net(rng, prefix)
        if is_full and has_kv_scales:
            tensors[f"{prefix}.self_attn.k_proj.k_scale"] = np.float32(0.7)
            tensors[f"{prefix}.self_attn.v_proj.v_scale"] = np.float32(0.8)
    tensors |= _norms(rng, MTP) | _mlp(rng, MTP, mtp) | _attention(rng, MTP, mtp) | (extra or {})
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors)
    config = _config(interval)
    if embedded is not None:
        config["quantization_config"] = embedded
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if hf_quant is not None:
        document = {"producer": {"name": "modelopt"}, "quantization": hf_quant}
        (folder / "hf_quant_config.json").write_text(json.dumps(document, indent=1))
    return folder


def write_tensors(path: Path, tensors: Tensors) -> None:
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    write_safetensors(
        path,
        [Outgoing(name, CODES[a.dtype], a.shape, lambda a=a: a) for name, a in arrays.items()],  # type: ignore[misc]
    )


def _linear(rng: np.random.Generator, name: str, out: int, inp: int, kind: Linear) -> Tensors:
    return {f"{name}.{part}": value for part, value in kind(rng, out, inp).items()}


def _norms(rng: np.random.Generator, prefix: str) -> Tensors:
    return {f"{prefix}.{n}.weight": bf16(rng, HIDDEN) for n in ("input_layernorm", "post_attention_layernorm")}


def _mlp(rng: np.random.Generator, prefix: str, kind: Linear) -> Tensors:
    shapes = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    return {k: v for n, s in shapes.items() for k, v in _linear(rng, f"{prefix}.mlp.{n}", *s, kind).items()}


def _attention(rng: np.random.Generator, prefix: str, kind: Linear) -> Tensors:
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "q_proj": (2 * HEADS * HEAD_DIM, HIDDEN),
        "k_proj": (kv, HIDDEN),
        "v_proj": (kv, HIDDEN),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }
    found = {k: v for n, s in shapes.items() for k, v in _linear(rng, f"{prefix}.self_attn.{n}", *s, kind).items()}
    return found | {f"{prefix}.self_attn.{n}.weight": bf16(rng, HEAD_DIM) for n in ("q_norm", "k_norm")}


def _delta_net(rng: np.random.Generator, prefix: str) -> Tensors:
    value_dim = LINEAR_V * LINEAR_DIM
    conv_dim = 2 * LINEAR_K * LINEAR_DIM + value_dim
    p = f"{prefix}.linear_attn"
    rows = {"in_proj_qkv": conv_dim, "in_proj_z": value_dim, "in_proj_b": LINEAR_V, "in_proj_a": LINEAR_V}
    return {
        **{f"{p}.{n}.weight": bf16(rng, out, HIDDEN) for n, out in rows.items()},
        f"{p}.out_proj.weight": bf16(rng, HIDDEN, value_dim),
        f"{p}.conv1d.weight": bf16(rng, conv_dim, 1, 4),
        f"{p}.A_log": rng.standard_normal(LINEAR_V).astype(np.float32),
        f"{p}.dt_bias": bf16(rng, LINEAR_V),
        f"{p}.norm.weight": bf16(rng, LINEAR_DIM),
    }


def _config(interval: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
        "layer_types": ["full_attention" if i in _full(interval) else "linear_attention" for i in range(LAYERS)],
        "linear_num_key_heads": LINEAR_K,
        "linear_num_value_heads": LINEAR_V,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": interval,
        "mtp_num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def mixed(base_algo: str, mtp_algo: str | None = None, *, interval: int = 4, kv: str | None = "FP8") -> dict[str, Any]:
    """A MIXED_PRECISION section that lists the base's modules, and the draft's when it is quantized."""

    def setting(algo: str) -> dict[str, Any]:
        return {"quant_algo": algo} | ({"group_size": 16} if "NVFP4" in algo else {})

    layers = {name: setting(base_algo) for name in module_names(interval)}
    if mtp_algo is not None:
        layers |= {name: setting(mtp_algo) for name in mtp_module_names()}
    return {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": kv, "quantized_layers": layers}
