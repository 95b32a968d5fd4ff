"""One checkpoint, two resolvers: the vendor's and ours, in the same words.

    python -m tests.support.edgellm_resolvers WHEEL     records the vendor's answers anew

A view maps every linear module (its full name in the checkpoint) to a scheme, and says how the KV cache is kept.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint, survey_checkpoint
from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.quantization import read_claims
from edgellm_worker.engine.edgellm.misread import read_facts
from edgellm_worker.engine.edgellm.rewrite import rewrite_mtp
from tests.support import edgellm_checkpoints as ck

GOLDEN = Path(__file__).parent.parent / "golden" / "edgellm_resolver_0.11.0.json"
CONFIGS = Path(__file__).parent.parent / "golden" / "configs"

Writer = Callable[[Path], Path]
View = dict[str, Any]

_UNIFORM = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
_EMBEDDED = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "ignore": ["lm_head", "mtp*", "*linear_attn*"],
}
_FP8_KV = {"num_bits": 8, "type": "float"}


def _case(**options: Any) -> Writer:
    return lambda folder: ck.write_checkpoint(folder, **options)


def _embedded_mixed() -> dict[str, Any]:
    section = ck.mixed("NVFP4")
    del section["kv_cache_quant_algo"]
    return section | {"quant_method": "modelopt", "kv_cache_scheme": _FP8_KV}


CASES: dict[str, Writer] = {
    "unquantized": _case(base=ck.dense, has_kv_scales=False),
    "mixed NVFP4, draft BF16": _case(hf_quant=ck.mixed("NVFP4")),
    "uniform NVFP4, draft BF16, excluded by wildcard": _case(
        hf_quant=_UNIFORM | {"exclude_modules": ["lm_head", "mtp*", "*linear_attn*"]}
    ),
    "uniform NVFP4 in config.json, draft BF16": _case(embedded=_EMBEDDED),
    "uniform FP8, draft FP8": _case(
        base=ck.fp8,
        mtp=ck.fp8,
        hf_quant={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*linear_attn*"]},
    ),
    "mixed NVFP4, draft FP8": _case(mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8")),
    "mixed NVFP4, draft NVFP4": _case(mtp=ck.nvfp4, hf_quant=ck.mixed("NVFP4", "NVFP4")),
    "mixed FP8, draft NVFP4": _case(base=ck.fp8, mtp=ck.nvfp4, hf_quant=ck.mixed("FP8", "NVFP4")),
    "all layers attention, draft BF16": _case(interval=1, hf_quant=_UNIFORM | {"exclude_modules": ["lm_head", "mtp*"]}),
    "mixed NVFP4 in config.json with kv_cache_scheme": _case(embedded=_embedded_mixed()),
    "FP8 KV claimed without scales": _case(
        has_kv_scales=False, hf_quant=_UNIFORM | {"exclude_modules": ["lm_head", "mtp*", "*linear_attn*"]}
    ),
    "mixed NVFP4, unquantized KV": _case(has_kv_scales=False, hf_quant=ck.mixed("NVFP4", kv=None)),
}

# Exported by ModelOpt itself, read where they lie.
EXPORTS = Path(__file__).parent.parent / "golden" / "quantized"


def _export(name: str) -> Writer:
    return lambda folder: EXPORTS / name


def _without_hf_quant(name: str) -> Writer:
    """As exporters leave it that write config.json only."""

    def write(folder: Path) -> Path:
        ignored = shutil.ignore_patterns("hf_quant_config.json")
        return Path(shutil.copytree(EXPORTS / name, folder / "export", ignore=ignored))

    return write


def _rewritten(name: str) -> Writer:
    return lambda folder: rewrite_mtp(CASES[name](folder / "source"), folder / "copy")


CASES |= {f"ModelOpt's {path.name}": _export(path.name) for path in sorted(EXPORTS.iterdir()) if path.is_dir()}
CASES |= {
    f"ModelOpt's {name}, config.json alone": _without_hf_quant(name)
    for name in ("mixed", "nvfp4-fp8-mtp", "fp8-fp8-kv")
}
CASES |= {
    f"{name}, rewritten": _rewritten(name)
    for name in (
        "mixed NVFP4, draft FP8",
        "mixed FP8, draft NVFP4",
        "ModelOpt's nvfp4-fp8-mtp",
        "ModelOpt's fp8-nvfp4-mtp",
    )
}

# Public configuration files, without weights: the files that a folder gets, and from where.
CONFIG_CASES: dict[str, dict[str, str]] = {
    "Qwen3.6-27B-NVFP4": {
        "config.json": "nvidia--Qwen3.6-27B-NVFP4_config.json",
        "hf_quant_config.json": "nvidia--Qwen3.6-27B-NVFP4_hf_quant_config.json",
    },
    "Qwen3.6-27B-NVFP4, config.json alone": {"config.json": "nvidia--Qwen3.6-27B-NVFP4_config.json"},
    "Qwen3-235B-A22B-NVFP4": {
        "config.json": "nvidia--Qwen3-235B-A22B-NVFP4_config.json",
        "hf_quant_config.json": "nvidia--Qwen3-235B-A22B-NVFP4_hf_quant_config.json",
    },
    "Qwen3.5-27B": {"config.json": "Qwen--Qwen3.5-27B_config.json"},
    "Qwen3-0.6B": {"config.json": "Qwen--Qwen3-0.6B_config.json"},
}


def write_configs(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        (folder / name).write_bytes((CONFIGS / source).read_bytes())
    return folder


def our_claims(folder: Path) -> dict[str, str]:
    """What the strongest config says of every module that it names or excludes, and of some that it does not."""
    problems = ProblemLog()
    quant_file = folder / "hf_quant_config.json"
    quant = json.loads(quant_file.read_text()) if quant_file.exists() else None
    claims = read_claims(json.loads((folder / "config.json").read_text()), quant, problems)
    assert not problems, problems.problems
    if not claims:
        return dict.fromkeys(_UNNAMED, "unquantized")
    names = [*claims[0].named, *claims[0].excluded, *_UNNAMED]
    found = {name: claims[0].of([name]) for name in sorted(set(names)) if not name.startswith("mtp")}
    return {name: "unquantized" if claim is None else str(claim.setting.scheme) for name, claim in found.items()}


_UNNAMED = [
    "lm_head",
    f"{ck.BASE}layers.3.self_attn.q_norm",
    f"{ck.BASE}embed_tokens",
    f"{ck.BASE}layers.5.mlp.up_proj",
]


def vendor_claims(folder: Path, modules: list[str]) -> dict[str, str]:
    """The vendor's parsed config about these modules, by name alone."""
    parse = importlib.import_module("experimental.builder.core.quantization").parse_quantization
    conversion = importlib.import_module("experimental.builder.models.qwen3_5.weights")
    root = json.loads((folder / "config.json").read_text())
    parsed = parse(str(folder), root, root.get("text_config", root), conversion)
    names = {name: conversion.normalize_checkpoint_name(name) for name in modules}
    return {name: _VENDOR_SCHEMES[parsed.module_type(short)] for name, short in names.items()}


def our_view(folder: Path) -> View:
    facts = read_facts(folder)
    model = survey_checkpoint(folder, read_values=False).model
    assert model is not None
    checkpoint = open_checkpoint(folder, read_values=False)
    draft_scales = checkpoint.view(Namespace.MTP).kv_scales(0)
    return {
        "modules": {name: str(scheme) for name, scheme in sorted(facts.schemes.items())},
        "kv": "FP8" if facts.has_fp8_kv else "unquantized",
        "draft_kv_scales": [float(draft_scales.k_scale), float(draft_scales.v_scale)],
    }


_VENDOR_SCHEMES = {"fp16": "unquantized", "fp8": "FP8", "nvfp4": "NVFP4", "nvfp4_a16": "NVFP4"}


def vendor_view(folder: Path, modules: list[str]) -> View:
    """The vendor's answers about these modules; its package must be importable."""
    config = importlib.import_module("experimental.builder.core.config").DeviceConfig.from_pretrained(str(folder))
    conversion = importlib.import_module("experimental.builder.models.qwen3_5.weights")
    weights_class = importlib.import_module("experimental.builder.core.weights").Weights

    def opened(role: str) -> Any:
        return weights_class(
            str(folder),
            group_size=config.group_size,
            quant=config.quant,
            component="llm",
            spec_type="mtp",
            spec_role=role,
            conversion=conversion,
            tie_word_embeddings=config.tie_word_embeddings,
        )

    base, draft = opened("base"), opened("draft")
    answers = {}
    for name in modules:
        if name.startswith("mtp."):
            answers[name] = draft.module_quant_type(name.removeprefix("mtp."))
        else:
            answers[name] = base.module_quant_type("model." + name.removeprefix(ck.BASE) if name != "lm_head" else name)
    scales = [float(scale) for scale in draft.qkv_scales("layers.0.self_attn")][-2:]
    base.close()
    draft.close()
    return {
        "modules": {name: _VENDOR_SCHEMES[answer] for name, answer in sorted(answers.items())},
        "kv": {"fp8": "FP8", None: "unquantized"}[config.kv_cache_quant],
        "draft_kv_scales": scales,
    }


def record(wheel: Path) -> None:
    sys.path.insert(0, str(wheel))
    GOLDEN.write_text(json.dumps({"checkpoints": record_views(), "configs": record_claims()}, indent=1) + "\n")


def record_views() -> dict[str, View]:
    views = {}
    for name, write in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = write(Path(scratch))
            views[name] = vendor_view(folder, sorted(read_facts(folder).schemes))
    return views


def record_claims() -> dict[str, dict[str, str]]:
    claims = {}
    for name, files in CONFIG_CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_configs(Path(scratch), files)
            claims[name] = vendor_claims(folder, sorted(our_claims(folder)))
    return claims


if __name__ == "__main__":
    record(Path(sys.argv[1]))
