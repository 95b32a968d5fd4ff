"""Models for the TensorRT tests: every family at the tiny checkpoint's sizes, and the public 27B configuration."""

from __future__ import annotations

import json
from pathlib import Path

from edgellm_worker.engine.models.config import ModelConfig, read_config
from edgellm_worker.engine.models.registry import Model, read_model
from tests.support.shape_source import Scheme, ShapeSource, everywhere

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "worker/edgellm_worker/data/tiny-qwen3.5-mtp"
CONFIGS = ROOT / "tests/golden/configs"
QWEN_27B = "nvidia--Qwen3.6-27B-NVFP4"


def tiny_config(family: str) -> ModelConfig:
    """The tiny checkpoint's own config, or a dense family with its sizes."""
    config = json.loads((TINY / "config.json").read_text())
    if family != "qwen3_5_text":
        for name in ("layer_types", "mtp_num_hidden_layers", "full_attention_interval"):
            del config[name]
        config |= {"model_type": family, "rope_parameters": {"rope_theta": 10000.0}, "num_hidden_layers": 3}
    return read_config(config)


def shapes_model(config: ModelConfig, scheme: Scheme) -> Model:
    source = ShapeSource(config, scheme)
    return read_model(config, source, source if config.num_mtp_layers else None)


def tiny_shapes(family: str, scheme: str = "dense") -> Model:
    return shapes_model(tiny_config(family), everywhere(scheme))


def qwen_27b() -> Model:
    """The base as `hf_quant_config.json` quantizes it, the draft in 16 bits."""
    config = read_config(json.loads((CONFIGS / f"{QWEN_27B}_config.json").read_text()))
    quantized = json.loads((CONFIGS / f"{QWEN_27B}_hf_quant_config.json").read_text())["quantization"]
    by_name = {
        name.removeprefix("model.language_model."): _SCHEMES[entry["quant_algo"]]
        for name, entry in quantized["quantized_layers"].items()
    }
    base = ShapeSource(config, lambda name: by_name.get(name, "dense"))
    return read_model(config, base, ShapeSource(config, everywhere("dense")))


_SCHEMES = {"FP8": "fp8", "W4A16_NVFP4": "w4a16", "NVFP4": "nvfp4"}
