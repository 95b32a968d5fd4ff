"""Mutated headers and configs: no crash, no memory blow-up. Four seed folders: single and sharded, ModelOpt and
compressed-tensors layouts. `make test` runs 500 cases, the soak run 24 000; EDGELLM_FUZZ_SEED picks another seed.
"""

import logging
import os
from pathlib import Path

import pytest

from tests.support.checkpoint_files import (
    FolderMaker,
    encode_compressed,
    encode_fp8,
    encode_nvfp4,
    linears,
    plain_tensors,
    quantize,
)
from tests.support.checkpoint_fuzz import run_cases

SEED = int(os.environ.get("EDGELLM_FUZZ_SEED", "20261130"))
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "vocab_size": 8,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAX_GROWTH_BYTES = 200 * 2**20


def seed_folders(root):
    def maker(name):
        one = FolderMaker(root / name)
        one.config |= SMALL
        one.tensors = plain_tensors(one.config)
        return one

    plain = maker("plain").split(3)
    mixed = maker("mixed")
    attention, mlps = linears(mixed.tensors, "self_attn"), linears(mixed.tensors, "mlp.")
    mixed.tensors = quantize(quantize(mixed.tensors, attention, encode_fp8), mlps, encode_nvfp4)
    layers = {name: {"quant_algo": "FP8"} for name in attention} | {name: {"quant_algo": "NVFP4"} for name in mlps}
    mixed.quant = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    packed = maker("packed")
    packed.tensors = quantize(packed.tensors, linears(packed.tensors, "mlp."), encode_compressed)
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    packed.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*attn.*", "mtp.fc"],
        "kv_cache_scheme": None,
    }
    nested = maker("nested")
    nested.config = {"model_type": "qwen3_5", "text_config": nested.config, "architectures": ["X"]}
    nested.tensors = plain_tensors(nested.config, "model.language_model.")
    nested.quant = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["mtp*"]}
    return [one.write() for one in (plain, mixed, packed, nested)]


def forget_the_peak() -> None:
    """Other tests of this process may have taken more memory than these cases should: count from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fuzz(tmp_path, num_cases):
    logging.disable(logging.WARNING)
    try:
        folders = seed_folders(tmp_path)
        forget_the_peak()
        before = peak_bytes()
        counts = run_cases(folders, range(num_cases), SEED)
    finally:
        logging.disable(logging.NOTSET)
    growth = peak_bytes() - before
    print(f"seed {SEED}: {num_cases} cases, {counts}, peak memory grew by {growth / 2**20:.0f} MiB")
    assert growth < MAX_GROWTH_BYTES
    assert counts["opened"] + counts["refused"] == num_cases
    assert counts["refused"] > num_cases / 3  # the mutations do damage
    assert counts["opened"] > num_cases / 100  # and not all of them


def test_the_seed_folders_are_sound(tmp_path):
    from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint

    for folder in seed_folders(tmp_path):
        assert open_checkpoint(folder).draft is not None


def test_500_mutated_checkpoints(tmp_path):
    fuzz(tmp_path, 500)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_24000_mutated_checkpoints(tmp_path):
    fuzz(tmp_path, 24_000)
