"""A checkpoint whose quantized draft is written again as BF16."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from edgellm_worker.engine.checkpoint.dtypes import DTYPES
from edgellm_worker.engine.checkpoint.quantization import Scheme
from edgellm_worker.engine.edgellm.misread import Misreading, ModelFacts, misreadings, refuse_misread
from edgellm_worker.engine.edgellm.rewrite import NOTE, rewrite_mtp
from edgellm_worker.engine.errors import CheckpointError
from tests.support import edgellm_checkpoints as ck


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Read by the safetensors library, not by the code under test."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in deserialize(path.read_bytes()):
            found[name] = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return found


def e2m1(code: int) -> float:
    """By the definition: sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -value if sign else value


def test_fp8_drafts_become_their_values_in_bf16(tmp_path: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8"))
    before, after = tensors_of(source), tensors_of(rewrite_mtp(source, tmp_path / "out"))
    name = "mtp.layers.0.self_attn.q_proj.weight"
    assert after[name].dtype == ml_dtypes.bfloat16
    expected = before[name].astype(np.float32) * np.float32(0.003)
    np.testing.assert_allclose(after[name].astype(np.float32), expected, rtol=2**-8)
    assert not [n for n in after if n.startswith("mtp.") and "scale" in n]


def test_nvfp4_drafts_become_their_values_in_bf16(tmp_path: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "in", base=ck.fp8, mtp=ck.nvfp4, hf_quant=ck.mixed("FP8", "NVFP4"))
    before, after = tensors_of(source), tensors_of(rewrite_mtp(source, tmp_path / "out"))
    module = "mtp.layers.0.mlp.down_proj"
    packed, blocks = before[f"{module}.weight"], before[f"{module}.weight_scale"].astype(np.float32)
    got = after[f"{module}.weight"].astype(np.float32)
    assert got.shape == (ck.HIDDEN, ck.INTER)
    for row, column in [(0, 0), (0, 1), (5, 16), (63, 127), (17, 40)]:
        byte = int(packed[row, column // 2])
        code = byte & 0xF if column % 2 == 0 else byte >> 4
        expected = e2m1(code) * float(blocks[row, column // 16]) * 0.01
        assert got[row, column] == pytest.approx(expected, rel=2**-8)


def test_reciprocal_global_scales_are_inverted(tmp_path: Path) -> None:
    module = "mtp.layers.0.mlp.up_proj"
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.nvfp4, hf_quant=ck.mixed("NVFP4", "NVFP4"))
    tensors = tensors_of(source)
    packed = tensors.pop(f"{module}.weight")
    del tensors[f"{module}.weight_scale_2"], tensors[f"{module}.input_scale"]
    tensors |= {f"{module}.weight_packed": packed, f"{module}.weight_global_scale": np.float32(100.0)}
    modelopt = tensors_of(rewrite_mtp(source, tmp_path / "modelopt"))
    (source / "model.safetensors").unlink()
    ck.write_tensors(source / "model.safetensors", tensors)
    compressed = tensors_of(rewrite_mtp(source, tmp_path / "compressed"))
    np.testing.assert_allclose(
        compressed[f"{module}.weight"].astype(np.float32), modelopt[f"{module}.weight"].astype(np.float32), rtol=2**-7
    )
    assert f"{module}.weight_packed" not in compressed


def test_everything_else_is_kept_byte_for_byte(tmp_path: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8"))
    (source / "tokenizer.json").write_text("{}")
    before, after = tensors_of(source), tensors_of(rewrite_mtp(source, tmp_path / "out"))
    for name, value in before.items():
        if not name.startswith("mtp.layers.0.mlp.") and not name.startswith("mtp.layers.0.self_attn."):
            assert value.tobytes() == after[name].tobytes(), name
    assert (tmp_path / "out" / "tokenizer.json").samefile(source / "tokenizer.json")


def test_the_quantization_section_forgets_the_draft(tmp_path: Path) -> None:
    section = ck.mixed("NVFP4", "FP8") | {"exclude_modules": ["lm_head", "mtp.fc"]}
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.fp8, hf_quant=section, embedded=dict(section))
    out = rewrite_mtp(source, tmp_path / "out")
    for got in (
        json.loads((out / "hf_quant_config.json").read_text())["quantization"],
        json.loads((out / "config.json").read_text())["quantization_config"],
    ):
        assert got["exclude_modules"] == ["lm_head", "mtp*"]
        assert set(got["quantized_layers"]) == set(ck.module_names())


def test_shards_without_draft_tensors_are_linked_and_the_index_follows(tmp_path: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8"))
    tensors = tensors_of(source)
    (source / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": {n: v for n, v in tensors.items() if not n.startswith("mtp.")},
        "model-00002-of-00002.safetensors": {n: v for n, v in tensors.items() if n.startswith("mtp.")},
    }
    for file, part in parts.items():
        ck.write_tensors(source / file, part)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    out = rewrite_mtp(source, tmp_path / "out")
    first = "model-00001-of-00002.safetensors"
    assert (out / first).samefile(source / first)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors_of(out))


def test_the_copy_is_made_once_and_never_over_something_else(tmp_path: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8"))
    out = rewrite_mtp(source, tmp_path / "out")
    stamp = (out / NOTE).stat().st_mtime_ns
    assert rewrite_mtp(source, out) == out
    assert (out / NOTE).stat().st_mtime_ns == stamp
    (source / "generation_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="made from something else"):
        rewrite_mtp(source, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": np.ones((3, 2), np.float32)}, "neither FP8 per tensor nor NVFP4"),
        ({"weight": np.ones((4, 4), np.float32)}, "neither FP8 per tensor nor NVFP4"),
    ],
)
def test_layouts_that_it_does_not_know_are_named(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    module = "mtp.layers.0.mlp.up_proj"
    extra = {f"{module}.{part}": value for part, value in change.items()}
    source = ck.write_checkpoint(tmp_path / "in", mtp=ck.fp8, hf_quant=ck.mixed("NVFP4", "FP8"), extra=extra)
    with pytest.raises(CheckpointError, match=f"{module}.weight: .*{message}"):
        rewrite_mtp(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unquantized_draft_leaves_nothing_to_rewrite(tmp_path: Path) -> None:
    source = ck.write_checkpoint(tmp_path / "in", hf_quant=ck.mixed("NVFP4"))
    with pytest.raises(CheckpointError, match="nothing to rewrite"):
        rewrite_mtp(source, tmp_path / "out")


def facts(base: Scheme, mtp: Scheme, *, is_mixed: bool = True) -> ModelFacts:
    schemes = dict.fromkeys(ck.module_names(), base) | dict.fromkeys(ck.mtp_module_names(), mtp)
    return ModelFacts(Path("/m"), schemes, is_mixed, has_fp8_kv=True)


@pytest.mark.parametrize(
    ("base", "mtp", "mlp_read_as", "attention_read_as"),
    [
        (Scheme.NVFP4, Scheme.FP8, Scheme.NVFP4, Scheme.DENSE),
        (Scheme.NVFP4, Scheme.NVFP4, None, Scheme.DENSE),
        (Scheme.FP8, Scheme.NVFP4, Scheme.FP8, Scheme.DENSE),
        (Scheme.NVFP4, Scheme.DENSE, None, None),
    ],
)
def test_misreadings_of_mixed_checkpoints(
    base: Scheme, mtp: Scheme, mlp_read_as: Scheme | None, attention_read_as: Scheme | None
) -> None:
    expected = [Misreading(f"{ck.MTP}.mlp.{m}", mtp, mlp_read_as) for m in sorted(ck.MLP) if mlp_read_as]
    expected += [
        Misreading(f"{ck.MTP}.self_attn.{m}", mtp, attention_read_as) for m in sorted(ck.ATTENTION) if attention_read_as
    ]
    assert misreadings(facts(base, mtp)) == expected


def test_uniform_checkpoints_are_read_rightly() -> None:
    assert misreadings(facts(Scheme.FP8, Scheme.FP8, is_mixed=False)) == []


def test_the_refusal_names_modules_reason_and_both_ways_out() -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_misread(facts(Scheme.NVFP4, Scheme.FP8))
    assert "mtp.layers.0.self_attn.q_proj: is FP8, would be read as unquantized" in str(caught.value)
    assert "excluded from quantization" in caught.value.problems[-1]
    assert "--rewrite-mtp bf16" in caught.value.problems[-1]
    refuse_misread(facts(Scheme.NVFP4, Scheme.NVFP4))  # dequantized: right values
