"""What the model code needs of a Hugging Face config.json, checked once and typed.

    qwen3_5_text, qwen3_5 (its text_config)   hybrid of Gated DeltaNet and gated attention, native MTP
    qwen3, llama                              dense attention

Anything else is refused by its name. Missing or contradictory fields are reported all at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.engine.models.fields import Fields
from edgellm_worker.engine.models.rope import Rope, read_rope


class Family(StrEnum):
    QWEN3_5 = "qwen3_5"
    QWEN3 = "qwen3"
    LLAMA = "llama"


class LayerKind(StrEnum):
    """How a layer mixes tokens; the values are those of `layer_types`."""

    ATTENTION = "full_attention"
    DELTA_NET = "linear_attention"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """`is_gated`: q_proj yields query and gate per head. `has_qk_norm`: RMS norm of each query and key head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_gated: bool
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`delta_net` is None for dense families. `num_mtp_layers` is 0 or 1."""

    family: Family
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    has_tied_head: bool
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig
    delta_net: DeltaNetConfig | None
    rope: Rope
    num_mtp_layers: int

    @property
    def has_zero_centred_norms(self) -> bool:
        """Norm weights are stored as w - 1."""
        return self.family is Family.QWEN3_5


_FAMILIES = {
    "qwen3_5_text": Family.QWEN3_5,
    "qwen3_5": Family.QWEN3_5,
    "qwen3": Family.QWEN3,
    "llama": Family.LLAMA,
}

SUPPORTED = f"supported: {', '.join(sorted(_FAMILIES))}, dense"
MAX_LAYERS = 512  # more is a damaged file: the tables made from the number stay small


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Parse config.json. Raises `CheckpointError` with every problem, each naming its field."""
    model_type = config.get("model_type")
    text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    if "moe" in str(model_type) or text.get("num_experts") or text.get("num_local_experts"):
        raise CheckpointError(
            [f"config.json: model_type: {model_type!r} is a mixture of experts, which is not supported; {SUPPORTED}"]
        )
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError([f"config.json: model_type: {model_type!r} is not supported; {SUPPORTED}"])
    fields = Fields(text)
    parsed = _read_text(family, fields, has_tied_head=_is_tied(config, text))
    fields.raise_problems()
    return parsed


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """The outer config's word counts where the text part is silent, as in transformers."""
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def _read_text(family: Family, fields: Fields, *, has_tied_head: bool) -> ModelConfig:
    is_hybrid = family is Family.QWEN3_5
    hidden_size = fields.positive("hidden_size")
    attention = _read_attention(family, fields, hidden_size)
    fields.require(fields.text("hidden_act", "silu") in {"silu", "swish"}, "hidden_act", "only silu is supported")
    layers = _read_layers(fields, is_hybrid=is_hybrid)
    if not is_hybrid and LayerKind.DELTA_NET in layers:
        fields.require(False, "layer_types", f"linear_attention in a {family} model")
    num_mtp_layers = fields.count("mtp_num_hidden_layers", 0) if is_hybrid else 0
    fields.require(num_mtp_layers <= 1, "mtp_num_hidden_layers", "only one MTP layer is supported")
    dedicated = fields.flag("mtp_use_dedicated_embeddings", default=False)
    fields.require(not dedicated, "mtp_use_dedicated_embeddings", "the draft must share the base's embeddings")
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        has_tied_head=has_tied_head,
        layers=layers,
        attention=attention,
        delta_net=_read_delta_net(fields) if is_hybrid else None,
        rope=read_rope(fields, attention.head_dim),
        num_mtp_layers=num_mtp_layers,
    )


def _read_attention(family: Family, fields: Fields, hidden_size: int) -> AttentionConfig:
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    fields.require(num_heads % num_kv_heads == 0, "num_key_value_heads", f"does not divide {num_heads} heads")
    fields.require(not fields.flag("use_sliding_window", default=False), "use_sliding_window", "not supported")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.positive("head_dim", hidden_size // num_heads),
        is_gated=family is Family.QWEN3_5 and fields.flag("attn_output_gate", default=True),
        has_qk_norm=family is not Family.LLAMA,
    )


def _read_layers(fields: Fields, *, is_hybrid: bool) -> tuple[LayerKind, ...]:
    """`layer_types` where given, else full attention at every `full_attention_interval`-th layer (hybrid) or all."""
    num_layers = fields.positive("num_hidden_layers")
    fields.require(num_layers <= MAX_LAYERS, "num_hidden_layers", f"at most {MAX_LAYERS} are supported")
    num_layers = min(num_layers, MAX_LAYERS)
    interval = fields.positive("full_attention_interval", 4) if is_hybrid else 1
    default = [LayerKind.ATTENTION if (i + 1) % interval == 0 else LayerKind.DELTA_NET for i in range(num_layers)]
    names = fields.names("layer_types", [str(kind) for kind in default])
    known = {str(kind): kind for kind in LayerKind}
    unknown = sorted(set(names) - set(known))
    fields.require(not unknown, "layer_types", f"unknown kinds {unknown}")
    fields.require(len(names) == num_layers, "layer_types", f"{len(names)} entries for {num_layers} layers")
    return tuple(known[name] for name in names if name in known)


def _read_delta_net(fields: Fields) -> DeltaNetConfig:
    num_keys = fields.positive("linear_num_key_heads")
    num_values = fields.positive("linear_num_value_heads")
    fields.require(num_values % num_keys == 0, "linear_num_value_heads", f"not a multiple of {num_keys} key heads")
    return DeltaNetConfig(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=fields.positive("linear_key_head_dim"),
        value_dim=fields.positive("linear_value_head_dim"),
        conv_kernel=fields.positive("linear_conv_kernel_dim", 4),
    )
