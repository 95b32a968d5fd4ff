"""Which model a config describes, as far as its tensors' names and shapes go.

A multimodal config holds the language model in `text_config`; that part is what is read. Every number is checked and
bounded here, so that the tables made from it are of sane size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgellm_worker.engine.checkpoint.folder import CONFIG
from edgellm_worker.engine.checkpoint.jsonfile import JsonObject
from edgellm_worker.engine.checkpoint.problems import ProblemLog


class Family(StrEnum):
    QWEN3_5 = "qwen3_5"
    QWEN3 = "qwen3"
    LLAMA = "llama"


class LayerKind(StrEnum):
    """The strings of `layer_types`."""

    LINEAR = "linear_attention"
    FULL = "full_attention"


FAMILIES: Mapping[str, Family] = {
    "qwen3_5": Family.QWEN3_5,
    "qwen3_5_text": Family.QWEN3_5,
    "qwen3": Family.QWEN3,
    "llama": Family.LLAMA,
}
SUPPORTED = "supported: qwen3_5 (text part), qwen3_5_text, qwen3 and llama, dense"

# Any of these set to a positive number means a mixture of experts, whatever the model type is called.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

MAX_LAYERS = 512
MAX_HEADS = 4096
MAX_SIZE = 2**20
MAX_VOCAB = 2**22


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated DeltaNet's dimensions."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class Architecture:
    """`num_mtp_layers` None: the config does not say. `has_output_gate`: q_proj yields [query | gate] per head."""

    name: str
    family: Family
    num_layers: int
    layer_kinds: tuple[LayerKind, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_output_gate: bool
    tie_word_embeddings: bool
    linear: LinearAttention | None
    num_mtp_layers: int | None
    has_mtp_embeddings: bool


def text_config(config: JsonObject) -> JsonObject:
    """The language model's own part, with the few keys that a multimodal config keeps outside of it."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")
    shared = {key: config[key] for key in outer if key in config}
    return {**shared, **inner, "architectures": config.get("architectures", [])}


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to one JSON object that reports what is missing or wrong, and goes on with a 1."""

    values: JsonObject
    report: Callable[[str, str], None]

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if value is None:
            self.report(key, "missing")
            return 1
        if type(value) is not int or not 1 <= value <= limit:
            self.report(key, f"must be an integer from 1 to {limit}, is {_brief(value)}")
            return 1
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.report(key, f"must be true or false, is {_brief(value)}")
            return default
        return value


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_architecture(config: JsonObject, problems: ProblemLog) -> Architecture | None:
    """None when the model is not one that this product knows; wrong numbers are reported all together."""
    text = text_config(config)
    family = _family(config, text, problems)
    if family is None:
        return None
    fields = _Fields(text, problems.about(CONFIG))
    num_layers = fields.integer("num_hidden_layers", MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", MAX_SIZE)
    num_heads = fields.integer("num_attention_heads", MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        problems.add(CONFIG, f"must divide num_attention_heads ({num_heads})", tensor="num_key_value_heads")
    for bias in ("attention_bias", "mlp_bias"):
        if fields.flag(bias, default=False):
            problems.add(CONFIG, "biases are not supported", tensor=bias)
    is_qwen3_5 = family is Family.QWEN3_5
    return Architecture(
        name=_name(text),
        family=family,
        num_layers=num_layers,
        layer_kinds=_layer_kinds(fields, family, num_layers),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", MAX_SIZE),
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", MAX_SIZE, max(1, hidden_size // num_heads)),
        has_output_gate=is_qwen3_5 and fields.flag("attn_output_gate", default=True),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        linear=_linear(fields) if is_qwen3_5 else None,
        num_mtp_layers=_num_mtp_layers(fields) if is_qwen3_5 else 0,
        has_mtp_embeddings=is_qwen3_5 and fields.flag("mtp_use_dedicated_embeddings", default=False),
    )


def _name(text: JsonObject) -> str:
    names = text.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return str(text["model_type"])


def _family(config: JsonObject, text: JsonObject, problems: ProblemLog) -> Family | None:
    model_type = config.get("model_type")
    if not config:  # missing or unreadable: reported already
        return None
    if not isinstance(model_type, str):
        problems.add(CONFIG, "missing: it says which model this is", tensor="model_type")
        return None
    experts = {key: text[key] for key in EXPERT_KEYS if type(text.get(key)) is int and text[key] > 0}
    if experts or "moe" in f"{model_type} {text.get('model_type')}".lower():
        count = next((f", {number} experts" for number in experts.values()), "")
        problems.add(
            CONFIG, f"{model_type}: mixture-of-experts{count}, is not supported; {SUPPORTED}", tensor="model_type"
        )
        return None
    family = FAMILIES.get(model_type)
    if family is None:
        problems.add(CONFIG, f"{_brief(model_type)} is not supported; {SUPPORTED}", tensor="model_type")
    return family


def _layer_kinds(fields: _Fields, family: Family, num_layers: int) -> tuple[LayerKind, ...]:
    """Layer i of Qwen3.5 is full attention where `layer_types` says so, by default every 4th."""
    if family is not Family.QWEN3_5:
        return (LayerKind.FULL,) * num_layers
    listed = fields.values.get("layer_types")
    if listed is None:
        interval = fields.integer("full_attention_interval", MAX_LAYERS, 4)
        return tuple(LayerKind.LINEAR if (i + 1) % interval else LayerKind.FULL for i in range(num_layers))
    kinds = {kind.value: kind for kind in LayerKind}
    if not isinstance(listed, list) or not all(isinstance(item, str) and item in kinds for item in listed):
        fields.report("layer_types", f"must be a list of {' and '.join(kinds)}")
        return (LayerKind.FULL,) * num_layers
    if len(listed) != num_layers:
        fields.report("layer_types", f"lists {len(listed)} layers, num_hidden_layers is {num_layers}")
        return (LayerKind.FULL,) * num_layers
    return tuple(kinds[item] for item in listed)


def _linear(fields: _Fields) -> LinearAttention:
    linear = LinearAttention(
        num_key_heads=fields.integer("linear_num_key_heads", MAX_HEADS),
        num_value_heads=fields.integer("linear_num_value_heads", MAX_HEADS),
        key_head_dim=fields.integer("linear_key_head_dim", MAX_SIZE),
        value_head_dim=fields.integer("linear_value_head_dim", MAX_SIZE),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 64, 4),
    )
    if linear.num_value_heads % linear.num_key_heads:
        fields.report("linear_num_key_heads", f"must divide linear_num_value_heads ({linear.num_value_heads})")
    return linear


def _num_mtp_layers(fields: _Fields) -> int | None:
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        value = fields.values.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= 1:
            fields.report(key, f"must be 0 or 1 (longer draft stacks are not supported), is {_brief(value)}")
            return None
        return value
    return None
