"""Checkpoints whose draft the vendor's resolver reads wrongly.

Its builder looks the draft's modules up by short name (`layers.0.mlp.up_proj`), and the tensors it takes then come from
`mtp.` as they should. The *setting* of a mixed-precision checkpoint does not: overrides are keyed as the checkpoint
spells them (`mtp.layers.0.mlp.up_proj`), which no short name finds, while the base layer of the same short name is
found. So for a module of the draft that is quantized,

    the vendor's setting = the setting of the base module with the same short name, unquantized where there is none

    draft    read as       what happens
    FP8      unquantized   codes are read as values, scales dropped: garbage without a word
    NVFP4    unquantized   dequantized to FP16: right, larger, slower; taken with a note
    FP8      NVFP4         the build stops: there is no NVFP4 weight
    NVFP4    FP8           packed bytes are read as FP8 values, or the build stops

An unquantized draft is read rightly whatever its base is, and so is any draft of a uniformly quantized checkpoint.
Seen in 0.11.0 (builder/core/quantization.py: module_type; weights.py: module_quant_type).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgellm_worker.engine.checkpoint.checkpoint import survey_checkpoint
from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.quantization import KvScheme, Scheme
from edgellm_worker.engine.errors import CheckpointError

DRAFT_PREFIX: Final = "mtp."
BASE_PREFIXES: Final = ("model.language_model.", "language_model.model.", "language_model.", "model.")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What this product's own resolver says of a checkpoint.

    schemes       scheme of every linear module, under its full name in the checkpoint
    is_mixed      the checkpoint's claim is per module (MIXED_PRECISION)
    has_fp8_kv    the KV cache is to be FP8
    """

    model_dir: Path
    schemes: Mapping[str, Scheme]
    is_mixed: bool
    has_fp8_kv: bool

    @property
    def has_draft(self) -> bool:
        return any(module.startswith(DRAFT_PREFIX) for module in self.schemes)


def read_facts(model_dir: Path) -> ModelFacts:
    """Open and resolve the checkpoint. Raises `CheckpointError` with every problem."""
    survey = survey_checkpoint(model_dir, read_values=False)
    if survey.problems or survey.model is None:
        raise CheckpointError([f"{model_dir}: {problem}" for problem in survey.problems])
    strongest = survey.claims[0] if survey.claims else None
    return ModelFacts(
        model_dir=model_dir,
        schemes={
            source.stored_as.rpartition(".")[0]: source.scheme for source in survey.model.resolution.linears.values()
        },
        is_mixed=strongest is not None and strongest.default is None,
        has_fp8_kv=survey.model.kv[Namespace.BASE].scheme is KvScheme.FP8,
    )


@dataclass(frozen=True, slots=True)
class Misreading:
    module: str
    scheme: Scheme
    read_as: Scheme

    @property
    def is_harmless(self) -> bool:
        """The values are right all the same."""
        return (self.scheme, self.read_as) == (Scheme.NVFP4, Scheme.DENSE)

    def __str__(self) -> str:
        return f"{self.module}: is {self.scheme}, would be read as {self.read_as}"


def short_name(module: str) -> str:
    """`model.language_model.layers.3.x` and `mtp.layers.3.x` -> `layers.3.x`."""
    for prefix in (DRAFT_PREFIX, *BASE_PREFIXES):
        if module.startswith(prefix):
            return module.removeprefix(prefix)
    return module


def misreadings(model: ModelFacts) -> list[Misreading]:
    """Modules of the draft that the vendor's resolver takes for something else, by name."""
    if not model.is_mixed:
        return []
    base = {short_name(m): scheme for m, scheme in model.schemes.items() if not m.startswith(DRAFT_PREFIX)}
    found = []
    for module, scheme in sorted(model.schemes.items()):
        if module.startswith(DRAFT_PREFIX) and scheme is not Scheme.DENSE:
            read_as = base.get(short_name(module), Scheme.DENSE)
            if read_as is not scheme:
                found.append(Misreading(module, scheme, read_as))
    return found


def refuse_misread(model: ModelFacts) -> None:
    """Raises `CheckpointError` with one line per misread module, the reason, and the two ways out."""
    wrong = [m for m in misreadings(model) if not m.is_harmless]
    if not wrong:
        return
    problems = [f"{model.model_dir}: {m}" for m in wrong]
    problems.append(
        "the vendor's builder takes a mixed-precision setting for the draft from the base layer of the same number; "
        "either export the checkpoint again with mtp* excluded from quantization, or build with --rewrite-mtp bf16, "
        "which writes a copy of the checkpoint whose draft is unquantized"
    )
    raise CheckpointError(problems)
