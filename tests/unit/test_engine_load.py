"""From a kind and a checkpoint to an engine with honest limits and traits."""

from __future__ import annotations

import pytest

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.demands import KvCacheDtype, WeightForm
from edgellm_worker.engine.errors import BuildError, CapacityError, DemandError
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from tests.support.tiny_engine import CHECKPOINT, generate, greedy, short_prompts


def test_an_unknown_kind_is_named_beside_those_there_are():
    with pytest.raises(BuildError, match=r"'magic'.*reference"):
        load_engine("magic", open_checkpoint(CHECKPOINT), EngineOptions())


def test_defaults_draft_three_tokens_where_the_checkpoint_has_mtp():
    engine = load_engine("reference", open_checkpoint(CHECKPOINT), EngineOptions())
    assert (engine.limits.num_speculative_tokens, engine.limits.max_verify_tree_size) == (3, 4)
    assert (engine.traits.speculative_method, engine.traits.drafts_when_sampled) == ("mtp", True)
    assert (engine.traits.in_flight, engine.traits.seeded) == (True, True)


def test_no_drafts_asked_for_says_so():
    engine = load_engine("reference", open_checkpoint(CHECKPOINT), EngineOptions(speculative=SpeculativeConfig(0)))
    assert engine.traits.speculative_method == "off: num_speculative_tokens is 0"
    assert engine.limits.num_speculative_tokens == 0


def test_tree_sizes_reach_the_limits_and_must_hold_the_drafts():
    wide = EngineOptions(speculative=SpeculativeConfig(2), max_draft_tree_size=4)
    limits = load_engine("reference", open_checkpoint(CHECKPOINT), wide).limits
    assert (limits.num_speculative_tokens, limits.max_draft_tree_size, limits.max_verify_tree_size) == (2, 4, 5)
    with pytest.raises(CapacityError, match=r"max-verify-tree-size 3 is below num_speculative_tokens \+ 1, 4"):
        load_engine("reference", open_checkpoint(CHECKPOINT), EngineOptions(max_verify_tree_size=3))


def test_wider_trees_change_no_text():
    prompt = short_prompts()[0]
    texts = [
        generate(
            load_engine("reference", open_checkpoint(CHECKPOINT), EngineOptions(max_verify_tree_size=size)),
            [greedy(prompt, 12)],
        )
        for size in (None, 9)
    ]
    assert texts[0] == texts[1]


def test_the_reference_decodes_all_weights_and_says_so_when_asked_for_another_form():
    with pytest.raises(DemandError, match="quantization nvfp4: the reference engine decodes all weights; the tensorrt"):
        load_engine("reference", open_checkpoint(CHECKPOINT), EngineOptions(quantization=frozenset({WeightForm.NVFP4})))
    assert load_engine(
        "reference", open_checkpoint(CHECKPOINT), EngineOptions(quantization=frozenset({WeightForm.FLOAT16}))
    )


def test_the_cache_can_be_asked_to_be_smaller():
    """Per element: float32, as the checkpoint says nothing; float16; FP8."""
    sizes = [
        load_engine(
            "reference", open_checkpoint(CHECKPOINT), EngineOptions(1, 64, 128, kv_cache_dtype=dtype)
        )._executor.memory_bytes["kv_cache"]
        for dtype in KvCacheDtype
    ]
    assert sizes == [4 * sizes[2], 2 * sizes[2], sizes[2]]


def test_a_capacity_beyond_the_models_positions_is_narrowed():
    options = EngineOptions(1, 4000, 4096, SpeculativeConfig(3))
    limits = load_engine("reference", open_checkpoint(CHECKPOINT), options).limits
    assert limits.max_kv_cache_capacity == 2048
    assert limits.max_new_tokens(limits.max_input_len) >= 1


def test_the_last_position_of_the_capacity_is_used_and_not_passed():
    prompt = short_prompts()[0]
    num_prompt = len(prompt.prompt_ids)
    options = EngineOptions(2, 64, num_prompt + 20 + 3 - 1, SpeculativeConfig(3))
    engine = load_engine("reference", open_checkpoint(CHECKPOINT), options)
    assert engine.limits.max_new_tokens(num_prompt) == 20
    assert generate(engine, [greedy(prompt, 20)] * 2) == [prompt.generated_ids[:20]] * 2


def test_an_adaptive_draft_length_leaves_the_text_alone():
    options = EngineOptions(3, 256, 512, SpeculativeConfig(4, adaptive=True))
    engine = load_engine("reference", open_checkpoint(CHECKPOINT), options)
    prompts = short_prompts()[:4]
    assert generate(engine, [greedy(prompt, 30) for prompt in prompts]) == [p.generated_ids[:30] for p in prompts]
