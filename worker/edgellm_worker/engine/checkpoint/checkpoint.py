"""A checkpoint folder, opened: headers and configs read, every part of the model resolved, nothing decoded.

    folder -> architecture, claims, names -> resolver -> views

Opening touches headers and scales only, so it takes a moment and little memory whatever the size of the weights. It
raises once, with everything that is wrong; a checkpoint that opens is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgellm_worker.engine.checkpoint.architecture import Architecture, LayerKind, read_architecture, text_config
from edgellm_worker.engine.checkpoint.folder import CONFIG, Folder, open_folder
from edgellm_worker.engine.checkpoint.forms import KV_LEAVES
from edgellm_worker.engine.checkpoint.jsonfile import JsonObject
from edgellm_worker.engine.checkpoint.kv import KvPlan, plan_kv
from edgellm_worker.engine.checkpoint.layout import Namespace, Part, base_parts, head_part, mtp_parts
from edgellm_worker.engine.checkpoint.names import NameTable, sort_names
from edgellm_worker.engine.checkpoint.problems import Problem, ProblemLog
from edgellm_worker.engine.checkpoint.quantization import QuantClaims, read_claims
from edgellm_worker.engine.checkpoint.resolve import Resolution, Resolver
from edgellm_worker.engine.checkpoint.shard import TensorEntry
from edgellm_worker.engine.checkpoint.values import check_finite, check_scalars
from edgellm_worker.engine.checkpoint.view import WeightView
from edgellm_worker.engine.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """What the files add up to, once the architecture is one that this product knows."""

    arch: Architecture
    names: NameTable
    resolution: Resolution
    kv: Mapping[Namespace, KvPlan]
    has_mtp: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was found out about a folder, sound or not. `model` None: not a model that this product knows."""

    path: Path
    folder: Folder | None
    claims: tuple[QuantClaims, ...]
    model: Model | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A sound checkpoint. `draft` is None when there is no MTP; `config` is the language model's own part."""

    path: Path
    arch: Architecture
    config: JsonObject
    generation_config: JsonObject
    base: WeightView
    draft: WeightView | None
    notes: tuple[str, ...]
    survey: Survey

    def view(self, namespace: Namespace) -> WeightView:
        """Raises KeyError for the draft of a checkpoint without one."""
        if namespace is Namespace.BASE:
            return self.base
        if self.draft is None:
            raise KeyError(f"{self.path}: the checkpoint has no {namespace} tensors")
        return self.draft


def open_checkpoint(path: Path, *, read_values: bool = True) -> Checkpoint:
    """Open a Hugging Face folder. Raises `CheckpointError` with every problem.

    `read_values` reads all weights once for NaN and infinity; without it only the scales are looked at.
    """
    survey = survey_checkpoint(path, read_values=read_values)
    if survey.problems or survey.folder is None or survey.model is None:
        raise CheckpointError([f"{path}: {problem}" for problem in survey.problems])
    for note in survey.notes:
        _log.warning("%s: %s", path, note)
    folder, model = survey.folder, survey.model
    is_tied = model.arch.tie_word_embeddings
    base = WeightView(Namespace.BASE, model.kv[Namespace.BASE], is_tied, model.resolution, folder.shards)
    draft = (
        WeightView(Namespace.MTP, model.kv[Namespace.MTP], is_tied, model.resolution, folder.shards, base)
        if model.has_mtp
        else None
    )
    return Checkpoint(
        path=path,
        arch=model.arch,
        config=text_config(folder.config),
        generation_config=folder.generation_config,
        base=base,
        draft=draft,
        notes=survey.notes,
        survey=survey,
    )


def survey_checkpoint(path: Path, *, read_values: bool) -> Survey:
    """Everything about a folder, problems included; raises nothing about its contents."""
    problems = ProblemLog()
    folder = open_folder(path, problems)
    if folder is None:
        return Survey(path, None, (), None, (), problems.problems)
    notes = list(folder.notes)
    claims = read_claims(folder.config, folder.quant_config, problems)
    arch = read_architecture(folder.config, problems)
    model = None if arch is None else _model(arch, folder, claims, problems, notes)
    if model is not None:
        _check_values(model, folder, problems, read_values=read_values)
    return Survey(path, folder, claims, model, tuple(notes), problems.problems)


def _model(
    arch: Architecture, folder: Folder, claims: tuple[QuantClaims, ...], problems: ProblemLog, notes: list[str]
) -> Model:
    names = sort_names(folder.tensors, problems)
    has_mtp = _has_mtp(arch, names, notes)
    parts = {(part.namespace, part.name): part for part in _parts(arch, names, has_mtp=has_mtp)}
    if arch.tie_word_embeddings and (Namespace.BASE, "lm_head") in parts:
        notes.append("embeddings are tied, yet lm_head is stored: the stored one is used")
    resolver = Resolver(parts, names, claims, folder.unreadable, folder.tensor_file, problems)
    resolution = resolver.resolve_all()
    layers = {Namespace.BASE: [i for i, kind in enumerate(arch.layer_kinds) if kind is LayerKind.FULL]}
    if has_mtp:
        layers[Namespace.MTP] = [0]
    kv = plan_kv(names, claims, layers, problems)
    for plan in kv.values():
        resolution.used.update(entry.name for pair in plan.pairs.values() for entry in pair.entries)
    for entry in folder.tensors.values():
        is_ignored = entry in names.vision or entry in names.computed
        if entry.name not in resolution.used and not is_ignored:
            problems.add(entry.file, "left over: no part of this model", tensor=entry.name)
    notes += resolver.notes()
    notes += [f"KV cache of {namespace}: {plan.reason}" for namespace, plan in kv.items() if "scale 1.0" in plan.reason]
    return Model(arch, names, resolution, kv, has_mtp)


def _parts(arch: Architecture, names: NameTable, *, has_mtp: bool) -> Iterator[Part]:
    yield from base_parts(arch)
    if arch.tie_word_embeddings and (Namespace.BASE, "lm_head") in names.modules:
        yield head_part(arch, Namespace.BASE)
    if has_mtp:
        yield from mtp_parts(arch)
        if (Namespace.MTP, "lm_head") in names.modules:
            yield head_part(arch, Namespace.MTP)


def _has_mtp(arch: Architecture, names: NameTable, notes: list[str]) -> bool:
    """Config and files may each speak of a draft.

    A config that promises one which the files lack is common (exporters drop tensors that transformers does not load)
    and harmless: nothing is drafted. Tensors that the config denies are a contradiction.
    """
    is_held = names.has_any(Namespace.MTP)
    if arch.num_mtp_layers is None and is_held:
        notes.append(f"{CONFIG} does not count MTP layers; the files hold one")
    if arch.num_mtp_layers and not is_held:
        notes.append(
            f"{CONFIG} counts {arch.num_mtp_layers} MTP layer, the files hold no mtp tensor: nothing is drafted"
        )
    if arch.num_mtp_layers == 0 and is_held:
        return False  # every mtp tensor is then reported as left over
    return is_held


def _scalars(model: Model) -> Iterator[TensorEntry]:
    seen: set[str] = set()
    for source in model.resolution.linears.values():
        for leaf in (*source.form.scalars, *source.form.optional):
            entry = source.tensors.get(leaf)
            if entry is not None and entry.name not in seen:
                seen.add(entry.name)
                yield entry
    for plan in model.kv.values():
        for pair in plan.pairs.values():
            yield from pair.entries


def _check_values(model: Model, folder: Folder, problems: ProblemLog, *, read_values: bool) -> None:
    check_scalars(_scalars(model), folder.shards, problems)
    if read_values:
        used = (folder.tensors[name] for name in sorted(model.resolution.used))
        check_finite((entry for entry in used if not _is_scale(entry)), folder.shards, problems)


def _is_scale(entry: TensorEntry) -> bool:
    return entry.num_elements == 1 and entry.name.rpartition(".")[2] in {*KV_LEAVES, "weight_scale"}
