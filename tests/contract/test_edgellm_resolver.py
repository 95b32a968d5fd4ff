"""The vendor's resolver and ours on the same checkpoints: where they differ, a named defect of the vendor's is why.

The vendor's answers are recorded; `make vendor` compares the record with its wheel.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from edgellm_worker.engine.edgellm.misread import misreadings, read_facts
from tests.support import edgellm_checkpoints as ck
from tests.support.edgellm_resolvers import (
    CASES,
    CONFIG_CASES,
    GOLDEN,
    our_claims,
    our_view,
    record_claims,
    record_views,
    write_configs,
)
from tests.support.edgellm_vendor import wheel_folder

RECORDED = json.loads(GOLDEN.read_text())


class Defect(StrEnum):
    """Of tensorrt-edgellm 0.11.0, experimental/builder/core."""

    SHORT_NAMES = "mixed-precision settings are looked up by short name, which finds the base's (quantization.py)"
    KV_NEEDS_SCALES = "an FP8 KV claim without k_scale tensors is silently FP16 (_resolve_kv_cache_quant)"
    KV_SCHEME_IGNORED = "a mixed section of config.json is not asked for kv_cache_scheme (quantization.py)"
    SCALE_LEAK = "k_scale and v_scale are not pinned to their module: base layer 0's reach the draft (weights.py)"


MLP = {f"{ck.MTP}.mlp.{m}" for m in ck.MLP}
ATTENTION = {f"{ck.MTP}.self_attn.{m}" for m in ck.ATTENTION}

FC = {"mtp.fc"}

# Case -> what differs ("kv", "draft_kv_scales" or a module) -> (ours, theirs, why). Everything else is equal.
EXPLAINED: dict[str, dict[str, tuple[Any, Any, Defect]]] = {
    "mixed NVFP4, draft FP8": {
        **dict.fromkeys(MLP, ("FP8", "NVFP4", Defect.SHORT_NAMES)),
        **dict.fromkeys(ATTENTION, ("FP8", "unquantized", Defect.SHORT_NAMES)),
    },
    "mixed NVFP4, draft NVFP4": dict.fromkeys(ATTENTION, ("NVFP4", "unquantized", Defect.SHORT_NAMES)),
    "mixed FP8, draft NVFP4": {
        **dict.fromkeys(MLP, ("NVFP4", "FP8", Defect.SHORT_NAMES)),
        **dict.fromkeys(ATTENTION, ("NVFP4", "unquantized", Defect.SHORT_NAMES)),
    },
    "ModelOpt's fp8-nvfp4-mtp": {
        **dict.fromkeys(MLP, ("NVFP4", "FP8", Defect.SHORT_NAMES)),
        **dict.fromkeys(ATTENTION | FC, ("NVFP4", "unquantized", Defect.SHORT_NAMES)),
    },
    "ModelOpt's nvfp4-fp8-mtp": {
        **dict.fromkeys(MLP, ("FP8", "NVFP4", Defect.SHORT_NAMES)),
        **dict.fromkeys(ATTENTION | FC, ("FP8", "unquantized", Defect.SHORT_NAMES)),
    },
    "ModelOpt's nvfp4-fp8-mtp, config.json alone": {
        **dict.fromkeys(MLP, ("FP8", "NVFP4", Defect.SHORT_NAMES)),
        **dict.fromkeys(ATTENTION | FC, ("FP8", "unquantized", Defect.SHORT_NAMES)),
    },
    "ModelOpt's mixed, config.json alone": {"kv": ("FP8", "unquantized", Defect.KV_SCHEME_IGNORED)},
    "all layers attention, draft BF16": {
        "draft_kv_scales": ([1.0, 1.0], [pytest.approx(0.7), pytest.approx(0.8)], Defect.SCALE_LEAK)
    },
    "mixed NVFP4 in config.json with kv_cache_scheme": {"kv": ("FP8", "unquantized", Defect.KV_SCHEME_IGNORED)},
    "FP8 KV claimed without scales": {"kv": ("FP8", "unquantized", Defect.KV_NEEDS_SCALES)},
}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    flat_ours = {**ours["modules"], "kv": ours["kv"], "draft_kv_scales": ours["draft_kv_scales"]}
    flat_theirs = {**theirs["modules"], "kv": theirs["kv"], "draft_kv_scales": theirs["draft_kv_scales"]}
    assert flat_ours.keys() == flat_theirs.keys()
    return {name: (flat_ours[name], flat_theirs[name]) for name in flat_ours if flat_ours[name] != flat_theirs[name]}


@pytest.mark.parametrize("case", CASES)
def test_every_difference_is_explained(case: str, tmp_path: Path) -> None:
    found = differences(our_view(CASES[case](tmp_path)), RECORDED["checkpoints"][case])
    explained = {name: (ours, theirs) for name, (ours, theirs, _) in EXPLAINED.get(case, {}).items()}
    assert found == explained


@pytest.mark.parametrize("case", CASES)
def test_the_misreadings_that_builds_refuse_are_those_that_happen(case: str, tmp_path: Path) -> None:
    """What the product predicts of the vendor's resolver is what the vendor's resolver says."""
    facts = read_facts(CASES[case](tmp_path))
    theirs = RECORDED["checkpoints"][case]["modules"]
    happened = {m: s for m, s in theirs.items() if m.startswith("mtp.") and s != str(facts.schemes[m])}
    assert {m.module: str(m.read_as) for m in misreadings(facts)} == happened


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_public_configurations_are_read_alike(case: str, tmp_path: Path) -> None:
    ours = our_claims(write_configs(tmp_path, CONFIG_CASES[case]))
    theirs = RECORDED["configs"][case]
    assert ours == theirs
    assert len(ours) >= 4


def test_the_large_mixed_configuration_was_really_compared() -> None:
    claims = RECORDED["configs"]["Qwen3.6-27B-NVFP4"]
    counts = {scheme: list(claims.values()).count(scheme) for scheme in set(claims.values())}
    assert counts["FP8"] > 200
    assert counts["NVFP4"] > 190


@pytest.mark.vendor
def test_the_record_is_what_the_wheel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(wheel_folder())
    assert record_views() == RECORDED["checkpoints"]
    assert record_claims() == RECORDED["configs"]
