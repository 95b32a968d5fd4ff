"""A checkpoint folder, opened: headers and configs read, every part of the model resolved, nothing decoded.

    folder -> claims, names, config -> model (every part resolved) -> views

Opening touches headers and scales only, so it takes a moment and little memory whatever the size of the weights. It
raises once, with everything that is wrong; a checkpoint that opens is complete.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from edgellm_worker.engine.checkpoint.folder import Folder, open_folder
from edgellm_worker.engine.checkpoint.jsonfile import JsonObject
from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.model import Model, resolve_model
from edgellm_worker.engine.checkpoint.problems import Problem, ProblemLog
from edgellm_worker.engine.checkpoint.quantization import QuantClaims, read_claims
from edgellm_worker.engine.checkpoint.values import check_finite, check_scalars
from edgellm_worker.engine.checkpoint.view import WeightView
from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.engine.models.config import ModelConfig

_log = logging.getLogger(__name__)


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
    """A sound checkpoint. `draft` is None when there is no MTP.

    config        the language model's own part of config.json; `model_config` is the same, typed
    notes         what was decided and is worth knowing; logged when opened
    """

    path: Path
    config: JsonObject
    model_config: ModelConfig
    generation_config: JsonObject
    base: WeightView
    draft: WeightView | None
    notes: tuple[str, ...]

    def view(self, namespace: Namespace) -> WeightView:
        """Raises `CheckpointError` for the draft of a checkpoint without one."""
        if namespace is Namespace.BASE:
            return self.base
        if self.draft is None:
            raise CheckpointError([f"{self.path}: the checkpoint has no {namespace} tensors"])
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
    model, shards = survey.model, survey.folder.shards
    base = WeightView(Namespace.BASE, model, shards)
    return Checkpoint(
        path=path,
        config=model.text,
        model_config=model.config,
        generation_config=survey.folder.generation_config,
        base=base,
        draft=WeightView(Namespace.MTP, model, shards, base) if model.has_mtp else None,
        notes=survey.notes,
    )


def survey_checkpoint(path: Path, *, read_values: bool) -> Survey:
    """Everything about a folder, problems included; raises nothing about its contents."""
    problems = ProblemLog()
    folder = open_folder(path, problems)
    if folder is None:
        return Survey(path, None, (), None, (), problems.problems)
    notes = list(folder.notes)
    claims = read_claims(folder.config or {}, folder.quant_config, problems)
    model = resolve_model(folder, claims, problems, notes)
    if model is not None:
        check_scalars(model.scalars(), folder.shards, problems)
        if read_values:
            scalars = {entry.name for entry in model.scalars()}
            tensors = (folder.tensors[name] for name in sorted(model.resolution.used - scalars))
            check_finite(tensors, folder.shards, problems)
    return Survey(path, folder, claims, model, tuple(notes), problems.problems)
