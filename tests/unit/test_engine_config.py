"""What config.json may say, and how the frequencies of each rotary variant come out."""

import json
from typing import Any

import numpy as np
import pytest

from edgellm_worker.engine.errors import CheckpointError
from edgellm_worker.engine.models.config import Family, LayerKind, read_config
from edgellm_worker.engine.models.rope import LinearScaling, Llama3Scaling, Rope
from tests.support.tiny_engine import CHECKPOINT

HYBRID: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text())
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


def problems(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_config(config)
    return "\n".join(caught.value.problems)


def test_the_hybrid_of_the_tiny_checkpoint():
    config = read_config(HYBRID)
    assert config.family is Family.QWEN3_5
    assert config.layers == (*(LayerKind.DELTA_NET,) * 3, LayerKind.ATTENTION) * 2
    assert config.delta_net is not None
    assert config.delta_net.num_channels == 512
    assert (config.rope.dim, config.rope.theta, config.num_mtp_layers) == (16, 10000.0, 1)
    assert config.has_tied_head
    assert config.has_zero_centred_norms
    assert config.attention.is_gated


def test_the_text_part_of_a_multimodal_config_is_the_same_model():
    text = {key: value for key, value in HYBRID.items() if key != "tie_word_embeddings"}
    outer = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True, "vision_config": {}}
    assert read_config(outer) == read_config(HYBRID)


def test_layer_kinds_follow_the_interval_where_they_are_not_listed():
    config = read_config({key: value for key, value in HYBRID.items() if key != "layer_types"})
    assert config.layers == read_config(HYBRID).layers


def test_old_rope_fields_say_the_same_as_new_ones():
    old = read_config({**DENSE, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = {**DENSE, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}
    assert old.rope == read_config(new).rope == Rope(500.0, 16, LinearScaling(2.0))


def test_defaults_of_a_plain_llama():
    config = read_config(DENSE)
    assert (config.attention.head_dim, config.rope.theta, config.has_tied_head) == (16, 10000.0, False)
    assert config.layers == (LayerKind.ATTENTION,) * 2
    assert config.delta_net is None
    assert not config.attention.has_qk_norm


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3_5_moe"}, "mixture of experts"),
        ({"model_type": "qwen3", "num_experts": 128}, "mixture of experts"),
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling.low_freq_factor"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_what_cannot_run_is_named(changes: dict[str, Any], named: str):
    assert named in problems({**DENSE, **changes})


def test_all_problems_come_at_once():
    found = problems({**DENSE, "hidden_size": 0, "vocab_size": -1, "rope_theta": "x"})
    assert all(name in found for name in ("hidden_size", "vocab_size", "rope_theta"))


def test_more_than_one_mtp_layer_is_refused():
    assert "mtp_num_hidden_layers" in problems({**HYBRID, "mtp_num_hidden_layers": 2})


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    scaled = Rope(10000.0, 64, Llama3Scaling(8.0, 1.0, 4.0, 128)).inv_freq()
    plain = Rope(10000.0, 64, None).inv_freq()
    assert scaled[0] == plain[0]
    assert np.isclose(scaled[-1], plain[-1] / 8)
    between = (plain / 8 < scaled) & (scaled < plain)
    assert between.any()
