"""The canary: recorded by the reference, written again by the engine that starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgellm_worker.engine.build import canary
from edgellm_worker.engine.build.canary import Canary
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import KvDtype
from tests.support.tensorrt_models import TINY, qwen_27b

SPEC = EngineSpec(4, 256, 4, KvDtype.FLOAT16)


@pytest.fixture(scope="module")
def model() -> Model:
    checkpoint = open_checkpoint(TINY)
    return read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)


@pytest.fixture(scope="module")
def recorded(model: Model) -> Canary:
    found = canary.record(model, SPEC, TINY)
    assert found is not None
    return found


@pytest.fixture
def engine():
    return load_engine("reference", open_checkpoint(TINY), EngineOptions(max_batch_size=1))


def test_it_is_a_text_with_the_margins_of_its_choices(recorded: Canary) -> None:
    assert len(recorded.token_ids) == len(recorded.gaps) == 16
    assert min(recorded.gaps) > 0
    assert Canary.read(recorded.as_json()) == recorded


def test_an_engine_that_writes_it_may_start(recorded: Canary, engine, caplog) -> None:
    """With drafts, where the recording had none."""
    caplog.set_level("INFO")
    canary.check(engine, recorded, is_quantized=False)
    assert "16 tokens as the reference engine wrote them" in caplog.text
    assert engine.num_rows == 0


def test_an_engine_that_writes_something_else_may_not(recorded: Canary, engine) -> None:
    other = replace(recorded, token_ids=(*recorded.token_ids[:3], 7, *recorded.token_ids[4:]), gaps=(3.0,) * 16)
    with pytest.raises(
        EngineError, match=r"token 3 is \d+, the reference engine wrote 7, preferred by 3\.00.*no job was"
    ):
        canary.check(engine, other, is_quantized=False)


def test_a_near_tie_may_fall_the_other_way(recorded: Canary, engine, caplog) -> None:
    caplog.set_level("INFO")
    other = replace(recorded, token_ids=(7, *recorded.token_ids[1:]), gaps=(0.2,) * 16)
    canary.check(engine, other, is_quantized=False)
    assert "a near tie" in caplog.text


def test_quantized_activations_are_given_more_room(recorded: Canary, engine) -> None:
    other = replace(recorded, token_ids=(7, *recorded.token_ids[1:]), gaps=(1.5,) * 16)
    canary.check(engine, other, is_quantized=True)
    with pytest.raises(EngineError):
        canary.check(engine, other, is_quantized=False)


def test_a_model_too_large_for_the_reference_has_none(caplog) -> None:
    assert canary.record(qwen_27b(), SPEC, TINY) is None
    assert "billion parameters are too many" in caplog.text


def test_parameters_are_counted_once(model: Model) -> None:
    """The tied table is one; the packaged checkpoint's card says 9.3 million without norms and gates."""
    assert 9e6 < canary.num_parameters(model, SPEC) < 11e6


def test_a_checkpoint_without_a_tokenizer_file_has_a_prompt_too(model: Model, tmp_path: Path) -> None:
    found = canary.record(model, replace(SPEC, kv_dtype=KvDtype.FP8), tmp_path)
    assert found is not None
    assert len(found.prompt_ids) == 8
