"""The models against transformers itself, on random small configurations of each family and on the tiny checkpoint.

Needs torch and transformers (the `oracle` extra); the recorded outputs serve everywhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm_worker.engine.models.config import read_config
from edgellm_worker.engine.models.registry import read_model
from edgellm_worker.engine.ops.reference import NumpyOps
from tests.support.safetensors_source import SafetensorsSource
from tests.support.tiny_engine import CHECKPOINT, logits_of, recorded

pytestmark = pytest.mark.oracle

SIZES = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 56, "max_position_embeddings": 512}
QWEN3_5 = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {**QWEN3_5, "tie_word_embeddings": True}),
    "qwen3_5, own head, other interval, theta and rotary part": (
        "Qwen3_5",
        {
            **QWEN3_5,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
            "rms_norm_eps": 1e-4,
        },
    ),
    "qwen3": ("Qwen3", {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 10}),
    "llama, linear rope, tied": (
        "Llama",
        {
            **SIZES,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}  # fmt: skip


def ours(folder: Path) -> Any:
    config = read_config(json.loads((folder / "config.json").read_text()))
    return read_model(config, SafetensorsSource(folder / "model.safetensors", "model."), None)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_random_model(name: str, tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    prefix, fields = FAMILIES[name]
    config_class = "Qwen3_5TextConfig" if prefix == "Qwen3_5" else f"{prefix}Config"
    torch.manual_seed(5)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, config_class)(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, fields["vocab_size"], (1, 150))
    with torch.no_grad():
        wanted = model(ids).logits[0].numpy()
    np.testing.assert_allclose(logits_of(ours(tmp_path), NumpyOps(), ids[0].tolist()), wanted, atol=1e-4, rtol=1e-4)


def test_logits_of_the_tiny_checkpoint():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    for prompt in recorded()[:3]:
        ids = [*prompt.prompt_ids, *prompt.generated_ids]
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(logits_of(ours(CHECKPOINT), NumpyOps(), ids), wanted, atol=2e-4, rtol=1e-4)
