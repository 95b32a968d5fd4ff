"""The dense families against logits that transformers recorded (make_families.py)."""

from pathlib import Path

import numpy as np
import pytest

from edgellm_worker.engine.api import GenerationRequest
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from tests.support.tiny_engine import generate, logits_of

HERE = Path(__file__).parent
FAMILIES = ("tiny-llama", "tiny-qwen3")
TOLERANCE = 3e-5


def read(name: str) -> Model:
    checkpoint = open_checkpoint(HERE / name)
    return read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str):
    expected, model, ops = np.load(HERE / name / "expected.npz"), read(name), NumpyOps()
    for ids, wanted in zip(expected["ids"].tolist(), expected["logits"], strict=True):
        np.testing.assert_allclose(logits_of(model, ops, ids), wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_without_mtp_runs_the_loop_with_no_drafts(name: str):
    """In a batch, in chunks, and although drafts were asked for: greedy text is the arg max over the whole sequence."""
    expected, model = np.load(HERE / name / "expected.npz"), read(name)
    options = EngineOptions(2, 64, 128, SpeculativeConfig(3), prefill_chunk_tokens=16)
    engine = load_engine("reference", open_checkpoint(HERE / name), options)
    assert engine.traits.speculative_method == "off: checkpoint has no MTP"
    assert (engine.limits.num_speculative_tokens, engine.traits.drafts_when_sampled) == (0, False)
    prompts = [tuple(ids[:length].tolist()) for ids, length in zip(expected["ids"], (30, 9), strict=True)]
    texts = generate(engine, [GenerationRequest(prompt, 12) for prompt in prompts])
    for prompt, text, logits in zip(prompts, texts, expected["logits"], strict=True):
        assert text[0] == logits[len(prompt) - 1].argmax()
        chosen = logits_of(model, NumpyOps(), (*prompt, *text[:-1]))[len(prompt) - 1 :]
        assert tuple(chosen.argmax(axis=-1).tolist()) == text
