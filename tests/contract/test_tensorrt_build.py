"""A bundle made by real builder processes, for a GPU that is not here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgellm_worker.engine.build.bundle import BundleKey, compile_in_children, ensure_bundle
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.errors import BuildError, NetworkRefused
from edgellm_worker.engine.models.registry import read_model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.trt import Flavour, Target, load_library
from tests.support.tensorrt_models import TINY

pytest.importorskip("tensorrt_rtx")

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"
SPEC = EngineSpec(2, 128, 1, KvDtype.FLOAT16, prefill_chunk=16, target=Target.SM89)


@pytest.mark.timeout(300)
def test_builder_processes_make_a_bundle_with_every_network_and_a_canary(tmp_path: Path) -> None:
    library = load_library(Flavour.TENSORRT_RTX)
    checkpoint = open_checkpoint(TINY, read_values=False)
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    networks = set(SPEC.segments(model, SPEC.reader()))
    key = BundleKey.of(TINY, SPEC, library, "sm89", networks)
    make = compile_in_children(TINY, SPEC, library, len(networks), tmp_path / "log")
    bundle, was_there = ensure_bundle(tmp_path, key, make)
    assert not was_there
    assert set(bundle.plans) == networks
    assert min(map(len, bundle.plans.values())) > 1000
    assert bundle.canary is not None
    assert len(bundle.canary.token_ids) == 16
    again, is_there = ensure_bundle(tmp_path, key, make)
    assert is_there
    assert again == bundle


@pytest.mark.timeout(120)
def test_a_builder_says_what_the_compiler_refused(tmp_path: Path) -> None:
    """FP4 on a GPU that has none: a child's exit, and NVIDIA's own words."""
    library = load_library(Flavour.TENSORRT_RTX)
    spec = replace(SPEC, runs_fp8=True, runs_fp4=True)
    with pytest.raises(NetworkRefused, match=r"cannot compile a network for sm89.*fp4"):
        compile_in_children(QUANTIZED / "nvfp4", spec, library, 8, tmp_path / "log")(tmp_path)


@pytest.mark.timeout(120)
def test_a_builder_without_its_checkpoint_says_so(tmp_path: Path) -> None:
    library = load_library(Flavour.TENSORRT_RTX)
    with pytest.raises(BuildError, match=r"exited 1.*(?s:.*)config\.json"):
        compile_in_children(tmp_path, SPEC, library, 1, tmp_path / "log")(tmp_path)
