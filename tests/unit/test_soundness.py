"""What an engine without a canary shows of itself: a sound one passes, one that computes something else does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgellm_worker.engine.api import Engine, EngineLimits, EngineTraits, GenerationRequest, RowUpdate, StepReport
from edgellm_worker.engine.build import soundness
from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.weights import DenseWeight
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime import tensorrt_engine
from edgellm_worker.engine.runtime.reference import reference_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from tests.support.tiny_engine import CHECKPOINT, tiny_engine, tiny_model

TEXT_IDS = soundness.text_ids(CHECKPOINT) or ()
Mend = Callable[[GenerationRequest, RowUpdate, int], RowUpdate]


class Bent:
    """An engine whose answers `bend(request, update, how many rows run)` changes."""

    def __init__(self, engine: Engine, bend: Mend) -> None:
        self._engine = engine
        self._bend = bend
        self._requests: dict[int, GenerationRequest] = {}

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def traits(self) -> EngineTraits:
        return self._engine.traits

    @property
    def num_rows(self) -> int:
        return self._engine.num_rows

    def add(self, row_id: int, request: GenerationRequest) -> None:
        self._requests[row_id] = request
        self._engine.add(row_id, request)

    def step(self) -> StepReport:
        count = self._engine.num_rows
        report = self._engine.step()
        return replace(report, updates=tuple(self._bend(self._requests[u.row_id], u, count) for u in report.updates))


def other_token(update: RowUpdate) -> RowUpdate:
    return replace(update, token_ids=tuple((token + 1) % 8192 for token in update.token_ids))


def engine_of(model: Model) -> Engine:
    return reference_engine(model.without_mtp(), EngineOptions(4, 256, 256, SpeculativeConfig(0)), KvDtype.FLOAT32)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_sound_engine_passes_and_is_empty_again(num_drafts: int, caplog) -> None:
    caplog.set_level("INFO")
    engine = tiny_engine(4, num_drafts)
    soundness.check(engine, TEXT_IDS, margin=0.5)
    assert engine.num_rows == 0
    assert "no canary: 96% of a plain text" in caplog.text


def shuffled(weight: DenseWeight, axis: int) -> DenseWeight:
    data = decode(weight)
    return DenseWeight(np.take(data, np.random.default_rng(0).permutation(data.shape[axis]), axis))


def with_head_off_by_one(model: Model) -> Model:
    return replace(model, base=replace(model.base, head=DenseWeight(np.roll(decode(model.base.head), 1, 0))))


def with_layers_swapped(model: Model) -> Model:
    first, second, *others = model.base.layers
    return replace(model, base=replace(model.base, layers=(second, first, *others)))


def with_columns_in_another_order(model: Model) -> Model:
    """As a wrong order of nibbles would."""
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, down=replace(layer.mlp.down, weight=shuffled(layer.mlp.down.weight, 1))))
        for layer in model.base.layers
    )
    return replace(model, base=replace(model.base, layers=layers))


@pytest.mark.parametrize("broken", [with_head_off_by_one, with_layers_swapped, with_columns_in_another_order])
def test_weights_out_of_place_cannot_read(broken: Callable[[Model], Model]) -> None:
    with pytest.raises(EngineError, match=r"of a plain text \d+% of the tokens.*that can read; no job was taken"):
        soundness.check(engine_of(broken(tiny_model())), TEXT_IDS, margin=0.5)


def test_a_share_that_is_low_and_not_absurd_is_told(caplog) -> None:
    """A final norm that lacks its 1."""
    model = tiny_model()
    norm = replace(model.base.norm, is_zero_centred=False)
    soundness.check(engine_of(replace(model, base=replace(model.base, norm=norm))), TEXT_IDS, margin=0.5)
    assert "of a plain text 7" in caplog.text
    assert "fewer than of most models" in caplog.text


def test_rounds_that_write_what_prompts_would_not_contradict_them() -> None:
    """A draft taken without being verified, a state folded by one token too many."""

    def bend(_request: GenerationRequest, update: RowUpdate, _count: int) -> RowUpdate:
        return other_token(update) if update.num_drafted else update

    with pytest.raises(EngineError, match=r"contradicts itself \(rounds\): token \d+ is \d+ where it is \d+ otherwise"):
        soundness.check(Bent(tiny_engine(4, 3), bend), TEXT_IDS, margin=0.5)


def test_a_text_that_depends_on_its_company_contradicts_itself() -> None:
    def bend(request: GenerationRequest, update: RowUpdate, count: int) -> RowUpdate:
        return other_token(update) if count > 1 and request.max_new_tokens > 1 else update

    with pytest.raises(EngineError, match=r"contradicts itself \(company\)"):
        soundness.check(Bent(tiny_engine(4, 3), bend), TEXT_IDS, margin=0.5)


def test_a_near_tie_is_no_contradiction(caplog) -> None:
    """Whatever is said to be one."""
    caplog.set_level("INFO")

    def bend(request: GenerationRequest, update: RowUpdate, count: int) -> RowUpdate:
        if count == 1 or request.max_new_tokens == 1:
            return update
        seconds = tuple(logprobs.top[1][0] for logprobs in update.logprobs)
        return replace(update, token_ids=seconds)

    soundness.check(Bent(tiny_engine(2, 0), bend), TEXT_IDS, margin=100.0)
    assert "a near tie" in caplog.text


def test_a_row_that_fails_is_no_proof() -> None:
    def bend(_request: GenerationRequest, update: RowUpdate, _count: int) -> RowUpdate:
        return replace(update, error="logits are not finite")

    with pytest.raises(EngineError, match="cannot write: logits are not finite"):
        soundness.check(Bent(tiny_engine(2, 0), bend), TEXT_IDS, margin=0.5)


def test_limits_too_small_for_it_are_told(caplog) -> None:
    soundness.check(tiny_engine(2, 0, capacity=20), TEXT_IDS, margin=0.5)
    assert "too short here for another check" in caplog.text


def test_a_large_models_engine_is_checked_before_it_is_opened(tmp_path) -> None:
    """One with a canary is not; one without a tokenizer cannot be."""
    broken = engine_of(with_layers_swapped(tiny_model()))
    with pytest.raises(EngineError, match="that can read"):
        tensorrt_engine._check(broken, None, CHECKPOINT, is_quantized=False)
    tensorrt_engine._check(broken, None, tmp_path, is_quantized=False)
