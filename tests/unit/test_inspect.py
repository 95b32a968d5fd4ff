"""`inspect` on the exported fixtures, as tables and as JSON."""

import json
import shutil
from pathlib import Path

import pytest

import edgellm_worker
from edgellm_worker.cli.main import main
from edgellm_worker.errors import ExitCode
from tests.support.checkpoint_files import FolderMaker

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"
TINY = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"

# fixture -> (schemes of the base, schemes of the draft, KV cache of both, words of the draft's reason)
EXPECTED = {
    "nvfp4": ({"unquantized", "NVFP4"}, {"NVFP4"}, "unquantized", "kv_cache_quant_algo is null"),
    "nvfp4-bf16-mtp": ({"unquantized", "NVFP4"}, {"unquantized"}, "unquantized", "as the base"),
    "fp8-fp8-kv": ({"unquantized", "FP8"}, {"FP8"}, "FP8", "kv_cache_quant_algo is FP8"),
    "mixed": ({"unquantized", "FP8", "NVFP4"}, {"unquantized"}, "FP8", "scale 1.0"),
    "nvfp4-fp8-mtp": ({"unquantized", "NVFP4"}, {"FP8"}, "unquantized", "as the base"),
    "fp8-nvfp4-mtp": ({"unquantized", "FP8"}, {"NVFP4"}, "unquantized", "as the base"),
}


def inspect(capsys, *argv: str) -> tuple[ExitCode, str]:
    code = main(["inspect", *argv])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("name", EXPECTED)
def test_json_of_each_fixture(capsys, name):
    code, out = inspect(capsys, str(QUANTIZED / name), "--json")
    report = json.loads(out)
    base_schemes, draft_schemes, kv_cache, reason = EXPECTED[name]
    assert code is ExitCode.DONE
    assert report["can_run"] is True
    assert report["problems"] == report["obstacles"] == []
    assert report["architecture"] == "Qwen3_5ForCausalLM"
    assert report["num_parameters"] == 792_112
    assert report["quantization_files"] == ["hf_quant_config.json", "config.json"]
    schemes = {
        namespace: {module["scheme"] for module in report["modules"] if module["namespace"] == namespace}
        for namespace in ("base", "mtp")
    }
    assert schemes == {"base": base_schemes, "mtp": draft_schemes}
    assert [one["kv_cache"] for one in report["namespaces"]] == [kv_cache] * 2
    assert reason in report["namespaces"][1]["kv_reason"]
    for place in report["mtp"]:
        shared = place["name"] in {"embed_tokens.weight", "lm_head.weight"}
        assert place["namespace"] == ("base" if shared else "mtp")
        assert place["stored_as"].startswith("model.language_model." if shared else "mtp.")
    assert len(report["mtp"]) == 17


def test_what_decided_is_a_file(capsys):
    _, out = inspect(capsys, str(QUANTIZED / "mixed"), "--json")
    modules = {(one["namespace"], one["name"]): one for one in json.loads(out)["modules"]}
    listed = modules["base", "layers.0.mlp.up_proj"]
    assert (listed["claimed"], listed["decided_by"]) == ("W4A16_NVFP4", "hf_quant_config.json")
    unlisted = modules["base", "layers.0.linear_attn.in_proj_a"]
    assert (unlisted["claimed"], unlisted["decided_by"]) == (None, "model.safetensors")
    excluded = modules["mtp", "layers.0.mlp.up_proj"]
    assert (excluded["claimed"], excluded["decided_by"]) == ("unquantized", "hf_quant_config.json")


@pytest.mark.parametrize("name", EXPECTED)
def test_tables_of_each_fixture(capsys, name):
    code, out = inspect(capsys, str(QUANTIZED / name))
    assert code is ExitCode.DONE
    for word in ("Namespaces", "Modules", "MTP tensors", "mtp.fc.weight", "can run: yes", "model.language_model."):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120


def test_layers_that_are_stored_alike_are_one_line(capsys):
    _, out = inspect(capsys, str(TINY))
    lines = [line.split() for line in out.splitlines()]
    assert ["base", "layers.N.linear_attn.in_proj_z", "0-2,4-6", "plain", "-", "model.safetensors"] in lines
    assert ["base", "layers.N.self_attn.o_proj", "3,7", "plain", "-", "model.safetensors"] in lines


def test_problems_are_printed_and_exit_2(capsys, tmp_path):
    maker = FolderMaker(tmp_path / "checkpoint")
    del maker.tensors["mtp.fc.weight"]
    code, out = inspect(capsys, str(maker.write()))
    assert code == ExitCode.OPERATOR == 2
    assert "problem: model.safetensors: mtp.fc.weight: missing tensor" in out
    assert "can run: no: the checkpoint has 1 problem; tokenizer.json is missing" in out


def test_no_folder_is_a_problem_not_a_traceback(capsys, tmp_path):
    code, out = inspect(capsys, str(tmp_path / "nothing"), "--json")
    assert code is ExitCode.OPERATOR
    assert json.loads(out)["problems"] == ["no such checkpoint folder"]


def test_without_a_tokenizer_it_cannot_run(capsys, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(QUANTIZED / "nvfp4", folder)
    (folder / "tokenizer.json").unlink()
    code, out = inspect(capsys, str(folder))
    assert code is ExitCode.OPERATOR
    assert "can run: no: tokenizer.json is missing" in out


def test_with_a_tokenizer_that_cannot_be_used_it_cannot_run(capsys, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(QUANTIZED / "nvfp4", folder)
    (folder / "tokenizer.json").write_text("{")
    code, out = inspect(capsys, str(folder))
    assert code is ExitCode.OPERATOR
    assert "problem: tokenizer.json: EOF while parsing" in out
    assert "can run: no: its tokenizer cannot be used" in out
    (folder / "config.json").write_text("{")
    assert inspect(capsys, str(folder))[1].count("problem: config.json") == 1, "what is said already is not said again"


def test_headers_only_leaves_the_weights_unread(capsys, tmp_path):
    maker = FolderMaker(tmp_path / "checkpoint")
    maker.tensors["model.norm.weight"][:] = float("nan")
    folder = str(maker.write())
    assert "model.norm.weight: NaN or infinite" in inspect(capsys, folder)[1]
    assert "NaN" not in inspect(capsys, folder, "--headers-only")[1]


def test_a_bracket_in_a_name_is_no_markup(capsys, tmp_path):
    maker = FolderMaker(tmp_path / "checkpoint")
    maker.tensors["model.[red]x"] = maker.tensors["model.norm.weight"]
    assert "model.[red]x: left over" in inspect(capsys, str(maker.write()))[1]
