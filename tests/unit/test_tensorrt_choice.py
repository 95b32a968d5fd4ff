"""What is built for which wishes on which machine: defaults narrow and say so, explicit wishes are met or refused."""

from __future__ import annotations

import pytest

from edgellm_worker.cli.main import main
from edgellm_worker.engine.build.choice import Machine, engine_spec
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.demands import KvCacheDtype, WeightForm
from edgellm_worker.engine.errors import CapacityError, DemandError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engine.trt import Flavour, Library
from tests.support.tensorrt_models import TINY, qwen_27b, tiny_shapes

OLD = Machine(Library(None, Flavour.TENSORRT, (8, 6, 1)), "sm90")
TURING = Machine(Library(None, Flavour.TENSORRT, (8, 6, 1)), "sm75")
AMPERE = Machine(Library(None, Flavour.TENSORRT_RTX, (1, 7, 1)), "sm86")
ADA = Machine(Library(None, Flavour.TENSORRT_RTX, (1, 7, 1)), "sm89")
SPARK = Machine(Library(None, Flavour.TENSORRT_RTX, (1, 7, 1)), "sm121")
THOR = Machine(Library(None, Flavour.TENSORRT, (10, 13, 0)), "sm110")


def choose(machine: Machine, scheme: str = "dense", kv: KvScheme = KvScheme.UNQUANTIZED, **options) -> EngineSpec:
    return engine_spec(tiny_shapes("qwen3_5_text", scheme), kv, EngineOptions(**options), machine)


@pytest.mark.parametrize(
    ("machine", "fp8", "fp4"),
    [(OLD, False, False), (AMPERE, False, False), (ADA, True, False), (SPARK, True, True), (THOR, True, True)],
)
def test_by_default_weights_run_as_they_are_natively_or_in_our_kernel(machine: Machine, fp8: bool, fp4: bool) -> None:
    spec = choose(machine, "nvfp4")
    assert (spec.runs_fp8, spec.runs_fp4, spec.packs) == (fp8, fp4, True)


def test_what_has_neither_is_decoded() -> None:
    spec = choose(TURING, "nvfp4")
    assert (spec.runs_fp8, spec.runs_fp4, spec.packs) == (False, False, False)


@pytest.mark.parametrize(
    ("machine", "scheme", "form", "words"),
    [
        (TURING, "fp8", WeightForm.FP8, r"tensorrt-8\.6\.1 on sm75 cannot run it \(compute capability 8\.0"),
        (TURING, "nvfp4", WeightForm.NVFP4, r"on sm75 cannot run it \(compute capability 8\.0"),
    ],
)
def test_weights_asked_for_that_cannot_run_are_refused_with_what_would_work(machine, scheme, form, words) -> None:
    assert choose(machine, scheme)
    with pytest.raises(DemandError, match=rf"quantization {form}: .*{words}.*float16.*decodes"):
        choose(machine, scheme, quantization=frozenset({form}))


def test_weights_asked_for_that_can_run_are_taken() -> None:
    assert choose(SPARK, "w4a16", quantization=frozenset({WeightForm.NVFP4})).runs_fp4
    assert choose(OLD, "nvfp4", quantization=frozenset({WeightForm.NVFP4})).packs
    mixed = EngineOptions(quantization=frozenset({WeightForm.NVFP4, WeightForm.FP8}))
    assert engine_spec(qwen_27b(), KvScheme.FP8, mixed, SPARK).runs_fp8


def test_weights_asked_for_that_the_checkpoint_does_not_have_are_refused_with_what_it_has() -> None:
    with pytest.raises(DemandError, match=r"quantization fp8: the checkpoint has no such weights; .* are nvfp4"):
        choose(SPARK, "nvfp4", quantization=frozenset({WeightForm.FP8}))
    with pytest.raises(DemandError, match="are none"):
        choose(SPARK, "dense", quantization=frozenset({WeightForm.NVFP4}))


def test_decoding_can_be_asked_for() -> None:
    spec = choose(SPARK, "w4a16", quantization=frozenset({WeightForm.FLOAT16}))
    assert (spec.runs_fp8, spec.runs_fp4, spec.packs) == (False, False, False)


def test_an_fp8_cache_is_narrowed_by_default_and_refused_when_it_was_asked_for(caplog) -> None:
    assert choose(SPARK, kv=KvScheme.FP8).kv_dtype is KvDtype.FP8
    assert choose(AMPERE, kv=KvScheme.FP8).kv_dtype is KvDtype.FLOAT16
    assert "the KV cache is kept in float16" in caplog.text
    with pytest.raises(DemandError, match=r"kv-cache-dtype fp8: .*sm86 cannot.*8\.9 or later.*float16 works"):
        choose(AMPERE, kv=KvScheme.FP8, kv_cache_dtype=KvCacheDtype.FP8)


def test_a_cache_type_asked_for_wins_over_the_checkpoint() -> None:
    assert choose(SPARK, kv=KvScheme.FP8, kv_cache_dtype=KvCacheDtype.FLOAT16).kv_dtype is KvDtype.FLOAT16
    assert choose(SPARK, kv_cache_dtype=KvCacheDtype.FP8).kv_dtype is KvDtype.FP8


def test_every_unmet_wish_is_told_at_once() -> None:
    wishes = {"quantization": frozenset({WeightForm.NVFP4}), "kv_cache_dtype": KvCacheDtype.FP8}
    with pytest.raises(DemandError) as raised:
        choose(TURING, "nvfp4", **wishes)
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [
        "quantization nvfp4",
        "kv-cache-dtype fp8",
    ]


def test_tree_sizes_default_to_what_drafting_needs() -> None:
    spec = choose(SPARK, speculative=SpeculativeConfig(5))
    assert (spec.max_verify, spec.max_draft_tree_size) == (6, 5)


def test_larger_tree_sizes_reserve_room_for_longer_drafts() -> None:
    spec = choose(SPARK, speculative=SpeculativeConfig(1), max_draft_tree_size=4)
    assert (spec.max_verify, spec.max_draft_tree_size) == (5, 4)
    spec = choose(SPARK, speculative=SpeculativeConfig(1), max_verify_tree_size=8)
    assert (spec.max_verify, spec.max_draft_tree_size) == (8, 1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_verify_tree_size": 3}, "max-verify-tree-size 3 is below num_speculative_tokens . 1, 4"),
        ({"max_draft_tree_size": 2}, "max-draft-tree-size 2 is below num_speculative_tokens, 3"),
        ({"max_draft_tree_size": 5, "max_verify_tree_size": 5}, "is below max-draft-tree-size . 1, 6"),
    ],
)
def test_a_tree_too_small_for_the_drafts_is_refused_by_name(sizes: dict[str, int], words: str) -> None:
    """Without a draft length in the settings, it is only known once the checkpoint is."""
    with pytest.raises(CapacityError, match=words):
        choose(SPARK, **sizes)


def test_a_model_without_a_draft_head_has_no_trees() -> None:
    spec = engine_spec(tiny_shapes("llama"), KvScheme.UNQUANTIZED, EngineOptions(max_verify_tree_size=6), SPARK)
    assert (spec.max_verify, spec.max_draft_tree_size) == (1, 0)


def test_tree_sizes_that_contradict_the_checkpoints_drafts_are_told_without_a_gpu(capsys) -> None:
    """All of them, before a library is looked for."""
    flags = ("--engine", "tensorrt", "--max-verify-tree-size", "2", "--max-draft-tree-size", "1")
    assert main(["build", str(TINY), *flags], {}) == 2
    assert capsys.readouterr().err.splitlines() == [
        "edgellm-worker: max-draft-tree-size 1 is below num_speculative_tokens, 3",
        "edgellm-worker: max-verify-tree-size 2 is below num_speculative_tokens + 1, 4",
    ]
