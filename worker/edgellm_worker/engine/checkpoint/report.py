"""What `inspect` tells of a checkpoint: plain data, ready for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edgellm_worker.engine.checkpoint.checkpoint import Survey, survey_checkpoint
from edgellm_worker.engine.checkpoint.folder import TOKENIZER_FILES, Folder
from edgellm_worker.engine.checkpoint.layout import SHARED_WITH_DRAFT, Namespace
from edgellm_worker.engine.checkpoint.model import Model
from edgellm_worker.engine.checkpoint.quantization import Scheme
from edgellm_worker.engine.checkpoint.shard import TensorEntry


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One quantizable module. `claimed` is the config's word for it, None when no config speaks of it."""

    namespace: Namespace
    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    form: str
    stored_as: str
    decided_by: str
    claimed: str | None


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """`num_bytes` is what its tensors take in the files."""

    namespace: Namespace
    prefix: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    kv_cache: str
    kv_reason: str


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor of the draft was found. `namespace` is the base where the draft has none of its own."""

    name: str
    namespace: Namespace
    stored_as: str
    file: str


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """`obstacles` are the reasons why this product cannot run it; empty when it can."""

    path: str
    architecture: str
    model_type: str
    num_layers: int
    num_parameters: int
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    tokenizer_files: tuple[str, ...]
    quantization_files: tuple[str, ...]
    namespaces: tuple[NamespaceReport, ...]
    modules: tuple[ModuleReport, ...]
    mtp: tuple[TensorPlace, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    obstacles: tuple[str, ...]

    @property
    def can_run(self) -> bool:
        return not self.obstacles


def report_checkpoint(path: Path, *, read_values: bool) -> CheckpointReport:
    """Survey a folder; raises nothing about its contents. `read_values` reads every weight for NaN and infinity."""
    survey = survey_checkpoint(path, read_values=read_values)
    folder, model = survey.folder, survey.model
    config = {} if folder is None else folder.config or {}
    architectures = config.get("architectures")
    namespaces = () if folder is None or model is None else tuple(_namespaces(folder, model))
    return CheckpointReport(
        path=str(path),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown",
        model_type=str(config.get("model_type", "unknown")),
        num_layers=0 if model is None else len(model.config.layers),
        num_parameters=sum(one.num_parameters for one in namespaces),
        num_tensors=0 if folder is None else len(folder.tensors),
        num_bytes=0 if folder is None else folder.size_bytes,
        files=() if folder is None else tuple(folder.shards),
        tokenizer_files=() if folder is None else folder.tokenizer_files,
        quantization_files=tuple(claims.file for claims in survey.claims),
        namespaces=namespaces,
        modules=() if model is None else tuple(_modules(model)),
        mtp=() if model is None or not model.has_mtp else tuple(_mtp_places(model)),
        ignored=() if model is None else tuple(entry.name for entry in (*model.names.vision, *model.names.computed)),
        notes=survey.notes,
        problems=tuple(map(str, survey.problems)),
        obstacles=tuple(_obstacles(survey)),
    )


def _obstacles(survey: Survey) -> list[str]:
    count = len(survey.problems)
    reasons = [f"the checkpoint has {count} problem{'s' if count > 1 else ''}"] if count else []
    if survey.folder is not None and TOKENIZER_FILES[0] not in survey.folder.tokenizer_files:
        reasons.append(f"{TOKENIZER_FILES[0]} is missing: text cannot be tokenized")
    return reasons


def _namespaces(folder: Folder, model: Model) -> list[NamespaceReport]:
    reports = []
    for namespace, plan in model.kv.items():
        modules = [module for key, module in model.names.modules.items() if key[0] is namespace]
        entries = [entry for module in modules for entry in module.tensors.values()]
        shapes = [
            source.part.shape
            for table in (model.resolution.linears, model.resolution.arrays)
            for key, source in table.items()
            if key[0] is namespace
        ]
        reports.append(
            NamespaceReport(
                namespace=namespace,
                prefix=model.names.spell(namespace, ""),
                num_tensors=len(entries),
                num_parameters=sum(map(math.prod, shapes)),
                num_bytes=sum(entry.num_bytes for entry in entries if entry.name in folder.tensors),
                kv_cache=plan.scheme,
                kv_reason=plan.reason,
            )
        )
    return reports


def _modules(model: Model) -> list[ModuleReport]:
    return [
        ModuleReport(
            namespace=namespace,
            name=name,
            shape=source.part.shape,
            scheme=source.scheme,
            form=source.form.name,
            stored_as=source.stored_as,
            decided_by=source.decided_by,
            claimed=source.claimed,
        )
        for (namespace, name), source in model.resolution.linears.items()
    ]


def _mtp_places(model: Model) -> list[TensorPlace]:
    """Every tensor of the draft, and what it shares with the base."""
    places = []
    for (namespace, name), linear in model.resolution.linears.items():
        if namespace is Namespace.MTP:
            entry = linear.tensors[linear.form.weight]
            places.append(TensorPlace(f"{name}.weight", namespace, entry.name, entry.file))
    for (namespace, name), array in model.resolution.arrays.items():
        if namespace is Namespace.MTP:
            places.append(TensorPlace(name, namespace, array.tensor.name, array.tensor.file))
    for module in SHARED_WITH_DRAFT:
        is_tied = module == "lm_head" and model.config.has_tied_head
        entry_or_none = _base_weight(model, "embed_tokens" if is_tied else module)
        if entry_or_none is not None:
            places.append(TensorPlace(f"{module}.weight", Namespace.BASE, entry_or_none.name, entry_or_none.file))
    return places


def _base_weight(model: Model, module: str) -> TensorEntry | None:
    linear = model.resolution.linears.get((Namespace.BASE, module))
    if linear is not None:
        return linear.tensors[linear.form.weight]
    array = model.resolution.arrays.get((Namespace.BASE, f"{module}.weight"))
    return None if array is None else array.tensor
