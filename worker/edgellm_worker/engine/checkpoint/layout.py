"""The tensors that a model consists of: names inside their namespace, and shapes. One table per kind of layer.

Names are those of the published checkpoints with the prefix taken off (`model.`, `model.language_model.`, `mtp.`), so
base and draft share short names such as `layers.0.mlp.down_proj`; what tells them apart is the namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from edgellm_worker.engine.models.config import AttentionConfig, DeltaNetConfig, LayerKind, ModelConfig


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

# Modules of the base that the draft uses as its own.
SHARED_WITH_DRAFT = ("embed_tokens", "lm_head")

_Shapes = dict[str, tuple[int, ...]]


def base_parts(config: ModelConfig) -> Iterator[Part]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Part(Namespace.BASE, "embed_tokens.weight", (vocab, hidden), is_linear=False)
    for index, kind in enumerate(config.layers):
        yield from _layer(config, Namespace.BASE, index, kind)
    yield Part(Namespace.BASE, "norm.weight", (hidden,), is_linear=False)
    if not config.has_tied_head:
        yield Part(Namespace.BASE, "lm_head", (vocab, hidden), is_linear=True)


def mtp_parts(config: ModelConfig) -> Iterator[Part]:
    """The draft: `fc` joins embedding and hidden state, then one full-attention layer and a norm."""
    hidden = config.hidden_size
    yield Part(Namespace.MTP, "pre_fc_norm_embedding.weight", (hidden,), is_linear=False)
    yield Part(Namespace.MTP, "pre_fc_norm_hidden.weight", (hidden,), is_linear=False)
    yield Part(Namespace.MTP, "fc", (hidden, 2 * hidden), is_linear=True)
    yield from _layer(config, Namespace.MTP, 0, LayerKind.ATTENTION)
    yield Part(Namespace.MTP, "norm.weight", (hidden,), is_linear=False)


def bias_part(part: Part) -> Part:
    """The bias of a linear part, for models that have one there."""
    return Part(part.namespace, f"{part.name}.bias", part.shape[:1], is_linear=False)


def _layer(config: ModelConfig, namespace: Namespace, index: int, kind: LayerKind) -> Iterator[Part]:
    arrays, linears = _mlp(config)
    if kind is LayerKind.DELTA_NET and config.delta_net is not None:
        mixer_arrays, mixer_linears = _delta_net(config.delta_net, config.hidden_size)
    else:
        mixer_arrays, mixer_linears = _attention(config.attention, config.hidden_size)
    for name, shape in (arrays | mixer_arrays).items():
        yield Part(namespace, f"layers.{index}.{name}", shape, is_linear=False)
    for name, shape in (linears | mixer_linears).items():
        yield Part(namespace, f"layers.{index}.{name}", shape, is_linear=True)


def _mlp(config: ModelConfig) -> tuple[_Shapes, _Shapes]:
    """The layer's norms and its feed-forward matrices."""
    hidden, inner = config.hidden_size, config.intermediate_size
    norms: _Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    return norms, {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _attention(attention: AttentionConfig, hidden: int) -> tuple[_Shapes, _Shapes]:
    dim = attention.head_dim
    query, key = attention.num_heads * dim, attention.num_kv_heads * dim
    norms: _Shapes = {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return norms if attention.has_qk_norm else {}, {
        "self_attn.q_proj": (query * 2 if attention.is_gated else query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
    }


def _delta_net(delta: DeltaNetConfig, hidden: int) -> tuple[_Shapes, _Shapes]:
    values = delta.num_value_heads
    inner = values * delta.value_dim
    arrays: _Shapes = {
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
        "linear_attn.conv1d.weight": (delta.num_channels, 1, delta.conv_kernel),
        "linear_attn.norm.weight": (delta.value_dim,),
    }
    return arrays, {
        "linear_attn.in_proj_qkv": (delta.num_channels, hidden),
        "linear_attn.in_proj_z": (inner, hidden),
        "linear_attn.in_proj_b": (values, hidden),
        "linear_attn.in_proj_a": (values, hidden),
        "linear_attn.out_proj": (hidden, inner),
    }
