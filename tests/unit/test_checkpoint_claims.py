"""Claims of hf_quant_config.json and config.json: which wins, what they contradict, what is not supported."""

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight
from tests.support.checkpoint_files import (
    UP,
    FolderMaker,
    encode_fp8,
    encode_nvfp4,
    linears,
    open_quick,
    problems_of,
    quantize,
)


@pytest.fixture
def maker(tmp_path):
    return FolderMaker(tmp_path / "checkpoint")


def test_hf_quant_config_wins_over_config_and_says_so(maker, caplog):
    modules = linears(maker.tensors, "mlp")
    maker.tensors = quantize(maker.tensors, modules, encode_nvfp4)
    maker.quant = {"quant_algo": "NVFP4", "exclude_modules": ["*attn*", "lm_head", "mtp.fc"]}
    maker.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["*attn*", "mtp.fc"],
    }
    checkpoint = open_quick(maker)
    assert isinstance(checkpoint.base.weight("layers.0.mlp.up_proj"), Nvfp4Weight)
    assert "on which hf_quant_config.json and config.json disagree: hf_quant_config.json wins" in caplog.text
    assert "NVFP4 over FP8" in caplog.text


def test_config_decides_where_hf_quant_config_is_not(maker):
    modules = linears(maker.tensors, "mlp")
    maker.tensors = quantize(maker.tensors, modules, encode_fp8)
    maker.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["*attn*", "mtp.fc"],
    }
    source = open_quick(maker).base._resolution.linears["base", "layers.0.mlp.up_proj"]
    assert (source.decided_by, source.claimed) == ("config.json", "FP8")


@pytest.mark.parametrize(
    ("quant", "said"),
    [
        ({"quant_algo": "FP8"}, "FP8 (default)"),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*up_proj*"]}, "unquantized (excluded)"),
        ({"quant_algo": None}, "unquantized (default)"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "FP8"}}}, "FP8 (module)"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"*mlp*": {"quant_algo": "FP8"}}}, "FP8 (module)"),
    ],
)
def test_a_claim_that_the_files_contradict_names_the_tensor(maker, quant, said):
    maker.tensors = quantize(maker.tensors, [UP], encode_nvfp4)
    maker.quant = quant
    assert problems_of(maker) == [
        f"model.safetensors: {UP}.weight: hf_quant_config.json says {said}, the tensors are NVFP4 (ModelOpt)"
    ]


@pytest.mark.parametrize(
    "pattern", ["model.layers.*.mlp.*", "*mlp*", "model.layers.[0-3].mlp.up_proj", "model.layers.?.mlp*"]
)
def test_wildcards_are_globs(maker, pattern):
    maker.quant = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {pattern: {"quant_algo": "NVFP4"}}}
    maker.tensors = quantize(maker.tensors, [UP], encode_nvfp4)
    source = open_quick(maker).base._resolution.linears["base", "layers.0.mlp.up_proj"]
    assert source.claimed == "NVFP4"


def test_the_most_specific_entry_wins(maker):
    """A module's own entry, then the exclude list, then what covers it, then the default."""
    layers = {UP: {"quant_algo": "FP8"}, "model.layers.0": {"quant_algo": "NVFP4"}, "*": {"quant_algo": "FP8"}}
    maker.quant = {
        "quant_algo": "NVFP4",
        "quantized_layers": layers,
        "exclude_modules": ["model.layers.0.mlp.*up*", "*gate*"],
    }
    maker.tensors = quantize(maker.tensors, [UP], encode_fp8)
    maker.tensors = quantize(maker.tensors, ["model.layers.0.mlp.down_proj"], encode_nvfp4)
    base = open_quick(maker).base
    assert isinstance(base.weight("layers.0.mlp.up_proj"), Fp8Weight)
    assert isinstance(base.weight("layers.0.mlp.down_proj"), Nvfp4Weight)
    assert isinstance(base.weight("layers.0.mlp.gate_proj"), DenseWeight)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "g": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"},
                }
            },
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
    ],
)
def test_an_unknown_algorithm_is_named_once_with_the_first_tensor_that_shows_it(maker, config):
    maker.tensors = quantize(maker.tensors, linears(maker.tensors, "mlp"), encode_nvfp4)
    maker.config["quantization_config"] = config
    (problem,) = problems_of(maker)
    word = {"awq": "awq", "compressed-tensors": "int4 per group of 128", "modelopt": "NVFP4_AWQ"}[
        config["quant_method"]
    ]
    assert problem.startswith(
        f"config.json: model.layers.0.mlp.gate_proj.weight: unsupported algorithm {word}, first seen"
    )
    assert "supported: FP8, NVFP4, W4A16_NVFP4" in problem


@pytest.mark.parametrize(
    ("leaves", "word"),
    [
        ({"qweight": np.zeros((64, 12), np.int32), "scales": np.zeros(4, np.float16)}, "AWQ or GPTQ"),
        (
            {"weight": np.zeros((96, 64), ml_dtypes.float8_e4m3fn), "weight_scale_inv": np.ones((1, 1), np.float32)},
            "FP8 in blocks",
        ),
        (
            {"weight": np.zeros((96, 64), ml_dtypes.float8_e4m3fn), "weight_scale": np.ones((96, 1), np.float32)},
            "one per tensor is supported",
        ),
        ({"weight": np.zeros((96, 32), np.uint8), "weight_scale": np.ones((96, 2), np.uint8)}, "MXFP4"),
        ({"weight": np.zeros((96, 64), np.int8), "weight_scale": np.ones((96,), np.float32)}, "stored as I8"),
        (
            {**encode_nvfp4(np.ones((96, 64), np.float32)), "pre_quant_scale": np.ones(64, np.float32)},
            "AWQ (pre_quant_scale)",
        ),
    ],
)
def test_foreign_schemes_are_named(maker, leaves, word):
    del maker.tensors[f"{UP}.weight"]
    maker.tensors |= {f"{UP}.{leaf}": np.asarray(value) for leaf, value in leaves.items()}
    (problem,) = problems_of(maker)
    assert problem.startswith(f"model.safetensors: {UP}.")
    assert word in problem


def test_wrong_sidecars_are_named(maker):
    maker.tensors = quantize(maker.tensors, [UP], encode_nvfp4)
    maker.tensors[f"{UP}.weight_scale"] = maker.tensors[f"{UP}.weight_scale"].astype(np.float32)
    maker.tensors["model.layers.0.mlp.gate_proj.weight_scale"] = np.array(1, np.float32)
    maker.tensors = quantize(maker.tensors, ["model.layers.0.mlp.down_proj"], encode_nvfp4)
    del maker.tensors["model.layers.0.mlp.down_proj.weight_scale_2"]
    problems = problems_of(maker)
    assert f"model.safetensors: {UP}.weight_scale: wrong dtype F32, must be F8_E4M3" in problems
    assert (
        "model.safetensors: model.layers.0.mlp.gate_proj.weight_scale: left over: a plain weight has no weight_scale"
        in problems
    )
    assert any(
        "model.layers.0.mlp.down_proj.weight: NVFP4 (ModelOpt): U8 weight without weight_scale_2" in problem
        for problem in problems
    )
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("value", "is_problem"),
    [("NVFP4", True), ("INT8", True), ("FP8", False), ("fp8", False)],
)
def test_kv_algorithms(maker, value, is_problem):
    maker.quant = {"quant_algo": None, "kv_cache_quant_algo": value}
    if is_problem:
        assert problems_of(maker) == [
            f"hf_quant_config.json: kv_cache_quant_algo: unsupported KV cache scheme {value}; supported: FP8"
        ]
    else:
        assert open_quick(maker).base.kv.scheme == "FP8"


@pytest.mark.parametrize("expression", ["re:(a+)+$", "re:[", "re:" + "a*" * 7, "re:" + "x" * 300])
def test_expressions_that_could_run_away_are_refused(maker, expression):
    maker.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": None, "ignore": [expression]}
    (problem,) = problems_of(maker)
    assert problem.startswith("config.json: exclude_modules: cannot be used as a pattern: 're:")
