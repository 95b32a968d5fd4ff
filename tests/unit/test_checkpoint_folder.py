"""Folders: shards, index, configs, shapes, values and claims that are wrong; one report names every fault."""

import json

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.jsonfile import MAX_JSON_BYTES
from edgellm_worker.engine.errors import CheckpointError
from tests.support.checkpoint_files import (
    UP,
    FolderMaker,
    encode_fp8,
    encode_nvfp4,
    linears,
    open_quick,
    plain_tensors,
    problems_of,
    quantize,
    write_shard,
)

INDEX = "model.safetensors.index.json"
ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def maker(tmp_path):
    return FolderMaker(tmp_path / "checkpoint")


def test_no_such_folder(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "nothing")
    assert caught.value.problems == (f"{tmp_path / 'nothing'}: no such checkpoint folder",)


def test_an_empty_folder(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert [problem.removeprefix(f"{tmp_path}: ") for problem in caught.value.problems] == [
        "config.json: no such file",
        "no safetensors file (other weight formats are not read)",
    ]


def test_shards_with_an_index(maker):
    maker.split(3)
    checkpoint = open_quick(maker)
    assert checkpoint.base.weight("layers.2.mlp.up_proj").shape == (96, 64)


def test_numbered_shards_without_an_index(maker):
    maker.split(2).write()
    (maker.path / INDEX).unlink()
    assert open_checkpoint(maker.path).draft is not None
    (maker.path / TWO).unlink()
    assert f"{TWO}: missing shard: {ONE} counts 2" in problems_of(maker, write=False)


def test_a_missing_shard_is_one_problem_not_one_per_tensor(maker):
    maker.split(2).write()
    (maker.path / TWO).unlink()
    assert problems_of(maker, write=False) == [f"{TWO}: missing shard: no such file"]


def test_a_truncated_shard(maker):
    maker.write()
    path = maker.path / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(size - 64 * 96 * 2)
    problems = problems_of(maker, write=False)
    assert problems
    assert all("truncated: ends at byte" in problem for problem in problems)


def test_index_and_shards_that_disagree(maker):
    maker.split(2).write()
    index = json.loads((maker.path / INDEX).read_text())
    names = list(index["weight_map"])
    index["weight_map"][names[0]] = TWO  # it is in ONE
    index["weight_map"]["model.ghost.weight"] = ONE
    del index["weight_map"][names[1]]
    (maker.path / INDEX).write_text(json.dumps(index))
    assert problems_of(maker, write=False) == [
        f"{TWO}: {names[0]}: {INDEX} places it here, but it is in {ONE}",
        f"{ONE}: model.ghost.weight: {INDEX} places it here, but no shard holds it",
        f"{ONE}: {names[1]}: {INDEX} does not name it",
    ]


def test_a_tensor_in_two_shards(maker):
    maker.split(2)
    name = maker.files[ONE][0]
    maker.files[TWO].append(name)
    maker.write()
    problems = problems_of(maker, write=False)
    assert f"{TWO}: {name}: duplicate tensor: also in {ONE}" in problems


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 7, "a\0.safetensors"]
)
def test_the_index_never_leads_out_of_the_folder(maker, file):
    maker.split(2).write()
    (maker.path.parent / "other.safetensors").write_bytes(b"")
    index = json.loads((maker.path / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = file
    (maker.path / INDEX).write_text(json.dumps(index))
    assert f"{INDEX}: {name}: {file!r} is no file name of this folder" in problems_of(maker, write=False)


def test_links_as_in_the_hugging_face_cache_are_followed(maker, tmp_path):
    maker.write()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (maker.path / "model.safetensors").rename(blobs / "abc")
    (maker.path / "model.safetensors").symlink_to("../blobs/abc")
    assert open_checkpoint(maker.path).draft is not None


def test_files_beside_the_named_ones_are_mentioned(maker):
    maker.write()
    write_shard(maker.path / "extra.safetensors", {"x": np.zeros(1, np.float32)})
    assert any("extra.safetensors beside it: not read" in note for note in open_checkpoint(maker.path).notes)


def test_everything_wrong_is_in_one_report(maker):
    maker.tensors[f"{UP}.weight"] = maker.tensors[f"{UP}.weight"][:-1]
    maker.tensors["model.norm.weight"] = maker.tensors["model.norm.weight"].astype(np.float64)
    maker.tensors["model.extra.weight"] = np.zeros(2, np.float32)
    del maker.tensors["mtp.norm.weight"]
    maker.tensors["model.layers.1.linear_attn.A_log"] = np.full(4, np.nan, np.float32)
    (maker.path).mkdir()
    (maker.path / "generation_config.json").write_text("{")
    problems = problems_of(maker)
    for wanted in (
        "generation_config.json: bad JSON",
        f"model.safetensors: {UP}.weight: wrong shape [95, 64], must be [96, 64]",
        "model.safetensors: model.norm.weight: wrong dtype F64, must be BF16, F16, F32",
        "model.safetensors: model.extra.weight: left over: no part of this model",
        "model.safetensors: mtp.norm.weight: missing tensor",
        "model.safetensors: model.layers.1.linear_attn.A_log: NaN or infinite, first at [0]",
    ):
        assert any(problem.startswith(wanted) for problem in problems), wanted
    assert len(problems) == 6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_non_finite_weights_are_located(maker, bad, dtype):
    weight = maker.tensors[f"{UP}.weight"].astype(dtype)
    weight[5, 7] = bad
    maker.tensors[f"{UP}.weight"] = weight
    assert problems_of(maker) == [f"model.safetensors: {UP}.weight: NaN or infinite, first at [5, 7]"]
    assert open_checkpoint(maker.path, read_values=False)


def test_nan_in_fp8_bytes_and_block_scales(maker):
    maker.tensors = quantize(maker.tensors, [UP], encode_fp8)
    maker.tensors[f"{UP}.weight"].view(np.uint8)[0, 3] = 0xFF
    down = "model.layers.1.mlp.down_proj"
    maker.tensors = quantize(maker.tensors, [down], encode_nvfp4)
    maker.tensors[f"{down}.weight_scale"].view(np.uint8)[2, 1] = 0x7F
    assert problems_of(maker) == [
        f"model.safetensors: {UP}.weight: NaN or infinite, first at [0, 3]",
        f"model.safetensors: {down}.weight_scale: NaN or infinite, first at [2, 1]",
    ]


@pytest.mark.parametrize("leaf", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_scales_that_cannot_be_are_found_without_reading_the_weights(maker, leaf, value):
    maker.tensors = quantize(maker.tensors, [UP], encode_nvfp4)
    maker.tensors[f"{UP}.{leaf}"] = np.array(value, np.float32)
    maker.write()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(maker.path, read_values=False)
    assert f"{UP}.{leaf}: a scale cannot be {np.float32(value)}" in str(caught.value)


def test_a_scale_is_not_rounded_through_float16(maker):
    """1e-9 is zero in float16."""
    maker.tensors = quantize(maker.tensors, [UP], encode_fp8)
    maker.tensors[f"{UP}.weight_scale"] = np.array(1e-9, np.float32)
    assert open_quick(maker).base.weight("layers.0.mlp.up_proj").scale == np.float32(1e-9)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_hidden_layers", 10**9, "at most 512"),
        ("hidden_size", "64", "an integer from 1 to"),
        ("layer_types", ["full_attention"], "1 entries for 4 layers"),
        ("model_type", "gpt2", "'gpt2' is not supported; supported: llama, qwen3, qwen3_5, qwen3_5_text, dense"),
        ("num_experts", 64, "mixture of experts, which is not supported; supported: llama"),
        ("mtp_num_hidden_layers", 2, "only one MTP layer is supported"),
    ],
)
def test_configs_that_this_product_cannot_run(maker, key, value, reason):
    maker.config[key] = value
    (problem,) = problems_of(maker)
    assert problem.startswith("config.json: ")
    assert reason in problem


def test_config_files_are_bounded_in_size(maker):
    maker.write()
    (maker.path / "config.json").write_text(" " * (MAX_JSON_BYTES + 1))
    (problem,) = problems_of(maker, write=False)
    assert problem.startswith(f"config.json: {MAX_JSON_BYTES + 1} bytes of JSON; at most")


def test_a_duplicate_key_in_a_config(maker):
    maker.write()
    text = (maker.path / "config.json").read_text()
    (maker.path / "config.json").write_text('{"hidden_size": 1, ' + text[1:])
    assert problems_of(maker, write=False) == ["config.json: bad JSON: the key 'hidden_size' appears twice"]


def test_biases_belong_to_the_model_where_they_are(tmp_path):
    maker = FolderMaker(tmp_path / "checkpoint")
    maker.config |= {"model_type": "llama", "attention_bias": True, "mtp_num_hidden_layers": 0}
    maker.config["rope_parameters"] = {"rope_theta": 10000.0}
    maker.tensors = plain_tensors(maker.config)
    missing = problems_of(maker)
    assert len(missing) == 4 * 4
    assert "model.safetensors: model.layers.0.self_attn.q_proj.bias: missing tensor" in missing
    for name in linears(maker.tensors, "self_attn"):
        maker.tensors[f"{name}.bias"] = np.zeros(len(maker.tensors[f"{name}.weight"]), np.float32)
    base = open_quick(maker).base
    assert base.has("layers.0.self_attn.q_proj.bias")
    assert base.array("layers.0.self_attn.q_proj.bias").shape == (64,)


def test_computed_buffers_are_ignored(maker):
    maker.tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert open_quick(maker).draft is not None
