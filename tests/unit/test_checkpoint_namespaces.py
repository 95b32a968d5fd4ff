"""Base and draft share short module names: weights, scales, settings and KV scales never cross between them."""

import numpy as np
import pytest

from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight
from edgellm_worker.engine.errors import CheckpointError
from tests.support.checkpoint_files import (
    CONFIG,
    FolderMaker,
    encode_compressed,
    encode_fp8,
    encode_nvfp4,
    linears,
    plain_tensors,
    quantize,
)

DOWN = "layers.0.mlp.down_proj"


def decoded(parts):
    """What an encoder's output stands for, worked out here."""
    weight = parts["weight"]
    if weight.dtype != np.uint8:
        return weight.astype(np.float32) * parts["weight_scale"]
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    pairs = np.stack([table[weight & 15], table[weight >> 4]], axis=-1).reshape(len(weight), -1, 16)
    scales = parts["weight_scale"].astype(np.float32) * parts["weight_scale_2"]
    return (pairs * scales[..., None]).reshape(len(weight), -1)


@pytest.fixture
def maker(tmp_path):
    return FolderMaker(tmp_path / "checkpoint")


def open_quick(maker):
    return open_checkpoint(maker.write())


def problems_of(maker) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        open_quick(maker)
    return [problem.removeprefix(f"{maker.path}: ") for problem in caught.value.problems]


def test_bf16_draft_under_an_nvfp4_base_that_shares_the_short_name(maker):
    original = maker.tensors
    maker.tensors = quantize(original, linears(original, "model.layers"), encode_nvfp4)
    maker.quant = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    checkpoint = open_quick(maker)
    draft = checkpoint.draft.weight(DOWN)
    assert isinstance(draft, DenseWeight)
    assert draft.data.tobytes() == original[f"mtp.{DOWN}.weight"].tobytes()
    base = checkpoint.base.weight(DOWN)
    assert isinstance(base, Nvfp4Weight)
    assert np.array_equal(decode(base), decoded(encode_nvfp4(original[f"model.{DOWN}.weight"])))
    # mtp.fc, too, though nothing excludes it: the bare-weight rule, and it is said
    assert isinstance(checkpoint.draft.weight("fc"), DenseWeight)
    assert any("of mtp, claimed NVFP4, are stored plain" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("base_encode", "draft_encode", "base_type", "draft_type"),
    [(encode_nvfp4, encode_fp8, Nvfp4Weight, Fp8Weight), (encode_fp8, encode_nvfp4, Fp8Weight, Nvfp4Weight)],
)
@pytest.mark.parametrize("config", ["mixed", "uniform", "none"])
def test_quantized_draft_under_a_differently_quantized_base(
    maker, base_encode, draft_encode, base_type, draft_type, config
):
    """Listed layer by layer, under a model-wide claim that means the base, or without any claim."""
    original = maker.tensors
    base, draft = linears(original, "model.layers"), linears(original, "mtp.")
    maker.tensors = quantize(quantize(original, base, base_encode), draft, draft_encode)
    algorithms = {base_type: "NVFP4" if base_type is Nvfp4Weight else "FP8"}
    algorithms[draft_type] = "FP8" if draft_type is Fp8Weight else "NVFP4"
    if config == "mixed":
        layers = {name: {"quant_algo": algorithms[base_type]} for name in base}
        layers |= {name: {"quant_algo": algorithms[draft_type]} for name in draft}
        maker.quant = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    elif config == "uniform":
        maker.quant = {"quant_algo": algorithms[base_type], "exclude_modules": ["lm_head"]}
    checkpoint = open_quick(maker)
    for view, prefix, kind, encode in (
        (checkpoint.base, "model.", base_type, base_encode),
        (checkpoint.draft, "mtp.", draft_type, draft_encode),
    ):
        for module in (DOWN, "layers.0.mlp.up_proj"):
            weight = view.weight(module)
            assert isinstance(weight, kind)
            assert np.array_equal(decode(weight), decoded(encode(original[f"{prefix}{module}.weight"])))


def test_fp8_bytes_are_never_read_without_their_own_scale(maker):
    """The base's scale of the same short name is no substitute."""
    original = maker.tensors
    maker.tensors = quantize(original, linears(original, "mlp"), encode_fp8)
    del maker.tensors[f"mtp.{DOWN}.weight_scale"]
    (problem,) = problems_of(maker)
    assert problem == (
        f"model.safetensors: mtp.{DOWN}.weight: FP8 per tensor: F8_E4M3 weight without weight_scale beside it "
        f"({DOWN}.weight_scale)"
    )


def test_a_pattern_of_one_namespace_does_not_reach_the_other(maker):
    """`model.*` excludes the base, `mtp*` the draft, a bare short name the base alone."""
    original = maker.tensors
    maker.tensors = quantize(original, linears(original, "mtp.layers"), encode_nvfp4)
    for excluded in (["model.*"], ["model.layers.0*"], ["layers.0.mlp.down_proj"], ["model.language_model"]):
        maker.quant = {"quant_algo": "NVFP4", "exclude_modules": [*excluded, "lm_head"]}
        assert isinstance(open_quick(maker).draft.weight(DOWN), Nvfp4Weight)
    maker.quant = {"quant_algo": "NVFP4", "exclude_modules": ["mtp*"]}
    problems = problems_of(maker)
    assert len(problems) == len(linears(original, "mtp.layers"))
    assert all("hf_quant_config.json says unquantized (excluded), the tensors are NVFP4" in line for line in problems)
    assert any(f"mtp.{DOWN}.weight" in line for line in problems)


def test_kv_scales_of_base_layer_0_are_not_the_drafts(maker):
    maker.config["layer_types"] = ["full_attention"] * 4
    maker.tensors = plain_tensors(maker.config)
    for layer in range(4):
        maker.tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = np.array(0.7 + layer, np.float32)
        maker.tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = np.array(0.8, np.float32)
    maker.quant = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    checkpoint = open_quick(maker)
    assert checkpoint.base.kv_scales(2).k_scale == np.float32(2.7)
    assert checkpoint.draft.kv.scheme is KvScheme.FP8
    assert checkpoint.draft.kv_scales(0).k_scale == np.float32(1)
    assert checkpoint.draft.kv_scales(0).v_scale == np.float32(1)


def test_the_drafts_own_kv_scales_are_used(maker):
    maker.tensors["mtp.layers.0.self_attn.k_proj.k_scale"] = np.array([0.25], np.float32)
    maker.tensors["mtp.layers.0.self_attn.v_proj.v_scale"] = np.array(0.5, np.float32)
    maker.quant = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    checkpoint = open_quick(maker)
    assert checkpoint.draft.kv_scales(0).k_scale == np.float32(0.25)
    assert checkpoint.draft.kv_scales(0).v_scale == np.float32(0.5)
    assert checkpoint.base.kv_scales(3).k_scale == np.float32(1)


@pytest.mark.parametrize("where", ["hf_quant_config", "config"])
def test_fp8_kv_without_scales_is_scale_one_and_said_for_base_and_draft(maker, where, caplog):
    if where == "hf_quant_config":
        maker.quant = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    else:
        scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
        maker.config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": scheme}
    checkpoint = open_quick(maker)
    for view in (checkpoint.base, checkpoint.draft):
        assert view.kv.scheme is KvScheme.FP8
        assert "no k_scale/v_scale in the files: scale 1.0" in view.kv.reason
    assert "KV cache of base" in caplog.text
    assert "KV cache of mtp: as the base" in caplog.text


def test_scales_of_some_layers_only_are_said(maker):
    maker.config["full_attention_interval"] = 2
    maker.tensors = plain_tensors(maker.config)
    maker.tensors["model.layers.1.self_attn.k_proj.k_scale"] = np.array(0.5, np.float32)
    maker.tensors["model.layers.1.self_attn.v_proj.v_scale"] = np.array(0.5, np.float32)
    maker.quant = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert "no k_scale/v_scale for layers 3: scale 1.0 there" in open_quick(maker).base.kv.reason


def test_kv_scales_without_a_claim_mean_fp8(maker):
    maker.tensors["model.layers.3.self_attn.k_scale"] = np.array(0.5, np.float32)
    maker.tensors["model.layers.3.self_attn.v_scale"] = np.array(0.25, np.float32)
    checkpoint = open_quick(maker)
    assert checkpoint.base.kv.scheme is checkpoint.draft.kv.scheme is KvScheme.FP8
    assert checkpoint.base.kv_scales(3).v_scale == np.float32(0.25)


def test_kv_scales_against_a_null_claim_are_a_contradiction(maker):
    maker.tensors["model.layers.3.self_attn.k_proj.k_scale"] = np.array(0.5, np.float32)
    maker.quant = {"quant_algo": None, "kv_cache_quant_algo": None}
    assert problems_of(maker) == [
        (
            "model.safetensors: model.layers.3.self_attn.k_proj.k_scale: a KV cache scale, but in hf_quant_config.json "
            "kv_cache_quant_algo is null"
        )
    ]


def test_reciprocal_global_scales_are_told_apart_by_their_names(maker):
    """ModelOpt multiplies by weight_scale_2, compressed-tensors divides by weight_global_scale: the same weights."""
    original = maker.tensors
    modules = linears(original, "mlp")
    maker.tensors = quantize(original, modules, encode_compressed)
    maker.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*linear_attn.*", "mtp.fc"],
    }
    checkpoint = open_quick(maker)
    for view, prefix in ((checkpoint.base, "model."), (checkpoint.draft, "mtp.")):
        weight = view.weight(DOWN)
        wanted = encode_nvfp4(original[f"{prefix}{DOWN}.weight"])
        assert weight.global_scale == pytest.approx(wanted["weight_scale_2"], rel=1e-6)
        assert weight.input_scale == np.float32(0.125)
        assert np.allclose(decode(weight), decoded(wanted), rtol=1e-6)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_base_prefixes(tmp_path, prefix):
    maker = FolderMaker(tmp_path / "checkpoint", tensors=plain_tensors(CONFIG, prefix))
    checkpoint = open_quick(maker)
    assert checkpoint.base.weight(DOWN).data.tobytes() == maker.tensors[f"{prefix}{DOWN}.weight"].tobytes()
    assert checkpoint.draft.weight(DOWN).data.tobytes() == maker.tensors[f"mtp.{DOWN}.weight"].tobytes()


def test_settings_spelled_with_another_prefix_than_the_tensors(tmp_path):
    """The list says model.layers..., the files model.language_model.layers...: the same module."""
    maker = FolderMaker(tmp_path / "checkpoint", tensors=plain_tensors(CONFIG, "model.language_model."))
    module = f"model.language_model.{DOWN}"
    maker.tensors = quantize(maker.tensors, [module], encode_nvfp4)
    maker.quant = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {f"model.{DOWN}": {"quant_algo": "NVFP4"}}}
    checkpoint = open_quick(maker)
    assert isinstance(checkpoint.base.weight(DOWN), Nvfp4Weight)
    assert isinstance(checkpoint.draft.weight(DOWN), DenseWeight)
    claims = {key[0]: source.claimed for key, source in checkpoint.base._resolution.linears.items() if key[1] == DOWN}
    assert claims == {"base": "NVFP4", "mtp": None}


@pytest.mark.parametrize("encode", [None, encode_fp8, encode_nvfp4])
def test_fused_tensors_are_rows_of_one(maker, encode):
    original = dict(maker.tensors)
    for prefix, fused, members in (
        ("model.layers.3.self_attn.", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("mtp.layers.0.self_attn.", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("model.layers.0.mlp.", "gate_up_proj", ("gate_proj", "up_proj")),
    ):
        rows = [maker.tensors.pop(f"{prefix}{member}.weight") for member in members]
        maker.tensors[f"{prefix}{fused}.weight"] = np.concatenate(rows)
        if encode is not None:
            maker.tensors = quantize(maker.tensors, [f"{prefix}{fused}"], encode)
    checkpoint = open_quick(maker)
    for view, prefix, module in (
        (checkpoint.base, "model.", "layers.3.self_attn.k_proj"),
        (checkpoint.base, "model.", "layers.3.self_attn.v_proj"),
        (checkpoint.draft, "mtp.", "layers.0.self_attn.q_proj"),
        (checkpoint.base, "model.", "layers.0.mlp.up_proj"),
    ):
        got = decode(view.weight(module))
        wanted = original[f"{prefix}{module}.weight"].astype(np.float32)
        assert got.shape == wanted.shape
        tolerance = {None: 0, encode_fp8: 0.02, encode_nvfp4: 0.06}[encode]
        assert np.abs(got - wanted).max() <= tolerance


def test_two_spellings_of_one_tensor_are_refused(maker):
    name = "model.layers.0.mlp.up_proj.weight"
    maker.tensors["model.language_model.layers.0.mlp.up_proj.weight"] = maker.tensors[name]
    (first, *_) = problems_of(maker)
    assert first == (
        "model.safetensors: model.language_model.layers.0.mlp.up_proj.weight: the same tensor as "
        f"{name} of model.safetensors"
    )


def test_the_draft_borrows_embedding_and_head_and_nothing_else(tmp_path):
    maker = FolderMaker(tmp_path / "checkpoint")
    maker.config["tie_word_embeddings"] = False
    maker.tensors = plain_tensors(maker.config)
    checkpoint = open_quick(maker)
    draft = checkpoint.view(Namespace.MTP)
    assert draft.weight("lm_head").data.tobytes() == maker.tensors["lm_head.weight"].tobytes()
    assert draft.weight("embed_tokens").data.tobytes() == maker.tensors["model.embed_tokens.weight"].tobytes()
    assert draft.has("lm_head.weight")
    assert not draft.has("layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"mtp: no module layers\.1\.mlp\.up_proj"):
        draft.weight("layers.1.mlp.up_proj")


def test_a_tied_head_is_the_embedding(maker):
    checkpoint = open_quick(maker)
    assert checkpoint.base.weight("lm_head").data.tobytes() == maker.tensors["model.embed_tokens.weight"].tobytes()


def test_without_mtp_tensors_nothing_is_drafted(maker):
    maker.tensors = {name: value for name, value in maker.tensors.items() if not name.startswith("mtp.")}
    checkpoint = open_quick(maker)
    assert checkpoint.draft is None
    assert any("holds no mtp tensor" in note or "hold no mtp tensor" in note for note in checkpoint.notes)
    with pytest.raises(CheckpointError):
        checkpoint.view(Namespace.MTP)


def test_a_draft_that_the_config_forgot_is_found(maker):
    del maker.config["mtp_num_hidden_layers"]
    checkpoint = open_quick(maker)
    assert checkpoint.draft is not None
    assert checkpoint.model_config.num_mtp_layers == 1
    assert any("mtp_num_hidden_layers" in note for note in checkpoint.notes)


def test_a_draft_that_the_config_denies_is_left_over(maker):
    maker.config["mtp_num_hidden_layers"] = 0
    problems = problems_of(maker)
    assert "model.safetensors: mtp.fc.weight: left over: no part of this model" in problems
    assert all(": mtp." in problem for problem in problems)


def test_half_a_draft_names_each_missing_tensor(maker):
    del maker.tensors["mtp.fc.weight"], maker.tensors["mtp.layers.0.self_attn.q_norm.weight"]
    assert sorted(problems_of(maker)) == [
        "model.safetensors: mtp.fc.weight: missing tensor",
        "model.safetensors: mtp.layers.0.self_attn.q_norm.weight: missing tensor",
    ]
