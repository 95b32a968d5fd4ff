"""The public configurations: names, shapes, wildcards and tables of real checkpoints, on sparse files of the real size."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint, survey_checkpoint
from edgellm_worker.engine.checkpoint.quantization import KvScheme, Scheme
from edgellm_worker.engine.checkpoint.report import report_checkpoint
from edgellm_worker.engine.errors import CheckpointError
from tests.support.sparse_checkpoints import model_tensors, write_sparse

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
NVFP4_27B, MOE, DENSE_27B, SMALL = (
    "nvidia--Qwen3.6-27B-NVFP4",
    "nvidia--Qwen3-235B-A22B-NVFP4",
    "Qwen--Qwen3.5-27B",
    "Qwen--Qwen3-0.6B",
)
VISION = {f"model.visual.blocks.{i}.attn.qkv.weight": ("BF16", (3456, 1152)) for i in range(27)}


def config_of(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}_config.json").read_text())


def layers_of(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}_hf_quant_config.json").read_text())["quantization"]["quantized_layers"]


def folder_of(path: Path, name: str, tensors: dict) -> Path:
    write_sparse(path, tensors)
    for file in ("config.json", "hf_quant_config.json"):
        source = CONFIGS / f"{name}_{file}"
        if source.exists():
            shutil.copy(source, path / file)
    return path


def test_the_mixed_precision_27b(tmp_path):
    """401 modules as the public table lists them, the rest and the whole draft plain, FP8 KV for both."""
    layers = layers_of(NVFP4_27B)
    tensors = model_tensors(config_of(NVFP4_27B), layers, "model.language_model.") | VISION
    checkpoint = open_checkpoint(folder_of(tmp_path, NVFP4_27B, tensors), read_values=False)
    sources = checkpoint.base._resolution.linears
    schemes = Counter((key[0].value, source.scheme) for key, source in sources.items())
    assert schemes == {
        ("base", Scheme.FP8): 208,
        ("base", Scheme.NVFP4): 193,
        ("base", Scheme.DENSE): 96,  # in_proj_a and in_proj_b of 48 layers
        ("mtp", Scheme.DENSE): 8,
    }
    for (namespace, name), source in sources.items():
        full = ("" if name == "lm_head" else "mtp." if namespace == "mtp" else "model.language_model.") + name
        wanted = layers.get(full, {}).get("quant_algo", "unquantized")
        assert (source.claimed or "unquantized") == wanted, full
        assert source.decided_by == ("hf_quant_config.json" if source.claimed else source.tensors["weight"].file)
    assert checkpoint.base.kv.scheme is checkpoint.draft.kv.scheme is KvScheme.FP8
    assert "scale 1.0" in checkpoint.draft.kv.reason
    assert not any("disagree" in note for note in checkpoint.notes)  # config.json says the same in its own way
    assert checkpoint.base.weight("layers.63.mlp.down_proj").shape == (5120, 17408)
    assert checkpoint.base.weight("lm_head").shape == (248320, 5120)


def test_the_27b_s_config_json_alone_says_the_same(tmp_path):
    tensors = model_tensors(config_of(NVFP4_27B), layers_of(NVFP4_27B), "model.language_model.")
    folder = folder_of(tmp_path, NVFP4_27B, tensors)
    both = open_checkpoint(folder, read_values=False).base._resolution.linears
    (folder / "hf_quant_config.json").unlink()
    alone = open_checkpoint(folder, read_values=False)
    for key, source in alone.base._resolution.linears.items():
        assert source.scheme is both[key].scheme
        assert (source.claimed is None) == (both[key].claimed is None), key
    assert alone.base.kv.scheme is KvScheme.FP8


def test_multimodal_checkpoints_load_their_text_part_and_list_the_vision_tensors(tmp_path):
    tensors = model_tensors(config_of(DENSE_27B), {}, "model.language_model.") | VISION
    report = report_checkpoint(folder_of(tmp_path, DENSE_27B, tensors), read_values=False)
    assert report.problems == ()
    assert report.architecture == "Qwen3_5ForConditionalGeneration"
    assert set(report.ignored) == set(VISION)
    assert {place.namespace for place in report.mtp if place.name.startswith(("embed", "lm_head"))} == {"base"}
    assert 26.5e9 < report.num_parameters < 28.5e9


def test_a_plain_dense_model_with_a_tied_head(tmp_path):
    tensors = model_tensors(config_of(SMALL), {}, "model.")
    checkpoint = open_checkpoint(folder_of(tmp_path, SMALL, tensors), read_values=False)
    assert checkpoint.draft is None
    assert checkpoint.base.weight("lm_head").shape == (151936, 1024)


def test_mixture_of_experts_is_refused_by_name_with_what_is_supported(tmp_path):
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": ("U8", (1536, 2048)) for i in range(128)}
    folder = folder_of(tmp_path, MOE, experts)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.problems == (
        (
            f"{folder}: config.json: model_type: 'qwen3_moe' is a mixture of experts, which is not supported; "
            "supported: llama, qwen3, qwen3_5, qwen3_5_text, dense"
        ),
    )
    survey = survey_checkpoint(folder, read_values=False)
    assert survey.claims[0].kv.scheme is KvScheme.FP8
    assert survey.claims[0].of(("model.layers.3.mlp.gate",)).setting.scheme is Scheme.DENSE
    assert survey.claims[0].of(("model.layers.3.mlp.experts.1.up_proj",)).setting.scheme is Scheme.NVFP4
