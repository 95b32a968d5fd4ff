"""The tensors that an architecture consists of: names inside their namespace, and shapes. One table per kind of layer.

Names are those of the published checkpoints with the prefix taken off (`model.`, `model.language_model.`, `mtp.`), so
base and draft share short names such as `layers.0.mlp.down_proj`; what tells them apart is the namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from edgellm_worker.engine.checkpoint.architecture import Architecture, Family, LayerKind, LinearAttention


class Namespace(StrEnum):
    """Whose tensors: the base model's or the MTP draft's."""

    BASE = "base"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the model.

    is_linear  a matrix [out, in] that may be quantized: `name` is its module, of the tensor `name`.weight and sidecars.
               Otherwise `name` is the tensor itself, always stored plain.
    """

    namespace: Namespace
    name: str
    shape: tuple[int, ...]
    is_linear: bool


# A fused tensor holds the rows of these modules one after another.
FUSED: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

# What the draft takes from the base when it has none of its own.
SHARED_WITH_DRAFT = ("embed_tokens", "lm_head")


def base_parts(arch: Architecture) -> Iterator[Part]:
    hidden, vocab = arch.hidden_size, arch.vocab_size
    yield Part(Namespace.BASE, "embed_tokens.weight", (vocab, hidden), is_linear=False)
    for index, kind in enumerate(arch.layer_kinds):
        yield from _layer(arch, Namespace.BASE, index, kind)
    yield Part(Namespace.BASE, "norm.weight", (hidden,), is_linear=False)
    if not arch.tie_word_embeddings:
        yield Part(Namespace.BASE, "lm_head", (vocab, hidden), is_linear=True)


def mtp_parts(arch: Architecture) -> Iterator[Part]:
    """The draft: `fc` joins embedding and hidden state, then one full-attention layer and a norm."""
    hidden = arch.hidden_size
    if arch.has_mtp_embeddings:
        yield Part(Namespace.MTP, "embed_tokens.weight", (arch.vocab_size, hidden), is_linear=False)
    yield Part(Namespace.MTP, "pre_fc_norm_embedding.weight", (hidden,), is_linear=False)
    yield Part(Namespace.MTP, "pre_fc_norm_hidden.weight", (hidden,), is_linear=False)
    yield Part(Namespace.MTP, "fc", (hidden, 2 * hidden), is_linear=True)
    yield from _layer(arch, Namespace.MTP, 0, LayerKind.FULL)
    yield Part(Namespace.MTP, "norm.weight", (hidden,), is_linear=False)


def head_part(arch: Architecture, namespace: Namespace) -> Part:
    """An lm_head that a checkpoint may hold though nothing asks for it: beside tied embeddings, or the draft's own."""
    return Part(namespace, "lm_head", (arch.vocab_size, arch.hidden_size), is_linear=True)


def _layer(arch: Architecture, namespace: Namespace, index: int, kind: LayerKind) -> Iterator[Part]:
    prefix = f"layers.{index}."
    hidden, inner = arch.hidden_size, arch.intermediate_size
    arrays: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linears = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if kind is LayerKind.LINEAR and arch.linear is not None:
        arrays |= _delta_arrays(arch.linear)
        linears |= _delta_linears(arch.linear, hidden)
    else:
        arrays |= _attention_arrays(arch)
        linears |= _attention_linears(arch)
    for name, shape in arrays.items():
        yield Part(namespace, prefix + name, shape, is_linear=False)
    for name, shape in linears.items():
        yield Part(namespace, prefix + name, shape, is_linear=True)


def _attention_arrays(arch: Architecture) -> dict[str, tuple[int, ...]]:
    if arch.family is Family.LLAMA:
        return {}
    return {"self_attn.q_norm.weight": (arch.head_dim,), "self_attn.k_norm.weight": (arch.head_dim,)}


def _attention_linears(arch: Architecture) -> dict[str, tuple[int, int]]:
    hidden = arch.hidden_size
    query, key = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return {
        "self_attn.q_proj": (query * 2 if arch.has_output_gate else query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
    }


def _delta_arrays(linear: LinearAttention) -> dict[str, tuple[int, ...]]:
    return {
        "linear_attn.A_log": (linear.num_value_heads,),
        "linear_attn.dt_bias": (linear.num_value_heads,),
        "linear_attn.conv1d.weight": (linear.conv_dim, 1, linear.conv_kernel),
        "linear_attn.norm.weight": (linear.value_head_dim,),
    }


def _delta_linears(linear: LinearAttention, hidden: int) -> dict[str, tuple[int, int]]:
    return {
        "linear_attn.in_proj_qkv": (linear.conv_dim, hidden),
        "linear_attn.in_proj_z": (linear.value_dim, hidden),
        "linear_attn.in_proj_b": (linear.num_value_heads, hidden),
        "linear_attn.in_proj_a": (linear.num_value_heads, hidden),
        "linear_attn.out_proj": (hidden, linear.value_dim),
    }
