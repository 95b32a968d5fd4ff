"""What the files of a folder add up to: every part of the model resolved, and whatever is wrong or worth saying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgellm_worker.engine.checkpoint.folder import CONFIG, Folder
from edgellm_worker.engine.checkpoint.jsonfile import JsonObject
from edgellm_worker.engine.checkpoint.kv import KvPlan, plan_kv
from edgellm_worker.engine.checkpoint.layout import Namespace, Part, base_parts, bias_part, mtp_parts
from edgellm_worker.engine.checkpoint.names import NameTable, sort_names
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.quantization import QuantClaims
from edgellm_worker.engine.checkpoint.resolve import Resolution, Resolver
from edgellm_worker.engine.checkpoint.shard import TensorEntry
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.engine.models.config import LayerKind, ModelConfig, read_config

MTP_COUNT = "mtp_num_hidden_layers"

# Keys of a multimodal config that stand outside of its language model's part and yet speak of it.
_OUTER_KEYS = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True, slots=True)
class Model:
    """`text` is the language model's own config.json part, completed by what the files say."""

    text: JsonObject
    config: ModelConfig
    names: NameTable
    resolution: Resolution
    kv: Mapping[Namespace, KvPlan]

    @property
    def has_mtp(self) -> bool:
        return Namespace.MTP in self.kv

    def scalars(self) -> Iterator[TensorEntry]:
        """Every scale of one number, once each."""
        held: dict[str, TensorEntry] = {}
        for source in self.resolution.linears.values():
            leaves = (*source.form.scalars, *source.form.optional)
            held |= {source.tensors[leaf].name: source.tensors[leaf] for leaf in leaves if leaf in source.tensors}
        for plan in self.kv.values():
            held |= {entry.name: entry for pair in plan.pairs.values() for entry in pair.entries}
        yield from held.values()


def text_part(config: JsonObject) -> JsonObject:
    """The language model's part of a config.json, with the outer keys that belong to it."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return dict(config)
    return {**{key: config[key] for key in _OUTER_KEYS if key in config}, **inner}


def resolve_model(
    folder: Folder, claims: tuple[QuantClaims, ...], problems: ProblemLog, notes: list[str]
) -> Model | None:
    """None when config.json describes no model that this product knows."""
    names = sort_names(folder.tensors, problems)
    holds_mtp = names.has_any(Namespace.MTP)
    if folder.config is None:
        return None
    raw = _with_mtp_count(folder.config, notes) if holds_mtp else folder.config
    config = _read_config(raw, problems)
    if config is None:
        return None
    if config.num_mtp_layers and not holds_mtp:
        notes.append(f"{CONFIG} counts an MTP layer, the files hold no mtp tensor: nothing is drafted")
    text = text_part(raw)
    has_mtp = holds_mtp and config.num_mtp_layers == 1  # tensors that the config denies are then left over
    parts = {(part.namespace, part.name): part for part in _parts(config, text, names, has_mtp=has_mtp)}
    resolver = Resolver(parts, names, claims, folder.unreadable, folder.tensor_file, problems)
    resolution = resolver.resolve_all()
    kv = plan_kv(names, claims, _attention_layers(config, has_mtp=has_mtp), problems)
    model = Model(text, config, names, resolution, kv)
    _check_left_over(model, folder, problems, notes)
    notes += resolver.notes()
    notes += [f"KV cache of {namespace}: {plan.reason}" for namespace, plan in kv.items() if "scale 1.0" in plan.reason]
    return model


def _read_config(config: JsonObject, problems: ProblemLog) -> ModelConfig | None:
    try:
        return read_config(config)
    except CheckpointError as error:
        for line in error.problems:
            problems.add(CONFIG, line.removeprefix(f"{CONFIG}: "))
        return None


def _with_mtp_count(config: JsonObject, notes: list[str]) -> JsonObject:
    """Where the config is silent about the draft, the files have the word."""
    inner = config.get("text_config")
    target = inner if isinstance(inner, dict) else config
    if target.get(MTP_COUNT) is not None:
        return config
    notes.append(f"{CONFIG} has no {MTP_COUNT}; the files hold a draft, so it is 1")
    completed = {**target, MTP_COUNT: 1}
    return {**config, "text_config": completed} if target is inner else completed


def _parts(config: ModelConfig, text: JsonObject, names: NameTable, *, has_mtp: bool) -> Iterator[Part]:
    """Biases belong to the model where the config wants them; one that is there unasked is used as well."""
    wants_bias = {"self_attn": text.get("attention_bias") is True, "mlp": text.get("mlp_bias") is True}
    for part in (*base_parts(config), *(mtp_parts(config) if has_mtp else ())):
        yield part
        block = part.name.split(".")[-2] if part.name.count(".") else ""
        is_held = names.find(part.namespace, part.name, "bias") is not None
        if part.is_linear and (is_held or wants_bias.get(block, False)):
            yield bias_part(part)


def _attention_layers(config: ModelConfig, *, has_mtp: bool) -> dict[Namespace, list[int]]:
    layers = {Namespace.BASE: [i for i, kind in enumerate(config.layers) if kind is LayerKind.ATTENTION]}
    return {**layers, Namespace.MTP: [0]} if has_mtp else layers


def _check_left_over(model: Model, folder: Folder, problems: ProblemLog, notes: list[str]) -> None:
    """Every tensor belongs to the model or to what is knowingly ignored."""
    kv_scales = {entry.name for plan in model.kv.values() for pair in plan.pairs.values() for entry in pair.entries}
    ignored = {entry.name for entry in (*model.names.vision, *model.names.computed)}
    if model.config.has_tied_head and (Namespace.BASE, "lm_head") in model.names.modules:
        head = model.names.modules[Namespace.BASE, "lm_head"]
        ignored |= {entry.name for entry in head.tensors.values()}
        notes.append("the embeddings are tied: the lm_head in the files is not read")
    known = model.resolution.used | kv_scales | ignored
    for name in sorted(folder.tensors.keys() - known):
        problems.add(folder.tensors[name].file, "left over: no part of this model", tensor=name)
