"""Number formats: every code, and every weight of the exported fixtures as ModelOpt's own dequantization gives it."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import edgellm_worker
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.checkpoint.decode import E2M1, decode
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Fp8Weight, Nvfp4Weight
from tests.support.checkpoint_files import encode_nvfp4, read_shard

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"
FIXTURES = sorted(path.name for path in QUANTIZED.iterdir() if path.is_dir())
TINY = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
E4M3 = ml_dtypes.float8_e4m3fn


def naive_nvfp4(weight: Nvfp4Weight) -> np.ndarray:
    """Element by element, in the order that the format is written down."""
    num_out, num_packed = weight.data.shape
    values = np.empty((num_out, num_packed * 2), np.float32)
    for row in range(num_out):
        for column in range(num_packed * 2):
            code = int(weight.data[row, column // 2]) >> (4 * (column % 2)) & 15
            exponent, mantissa = code >> 1 & 3, code & 1
            magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            scale = np.float32(weight.block_scale[row, column // 16]) * weight.global_scale
            values[row, column] = np.float32(-magnitude if code & 8 else magnitude) * scale
    return values


def random_nvfp4(num_out: int, num_in: int, seed: int = 0) -> Nvfp4Weight:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (num_out, num_in // 2)).astype(np.uint8)
    scales = rng.integers(0, 0x7F, (num_out, num_in // 16)).astype(np.uint8).view(E4M3)
    return Nvfp4Weight(data, scales, np.float32(0.0123))


def test_every_e2m1_code():
    assert list(E2M1) == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.array_equal(E2M1, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_every_packed_byte_low_nibble_first():
    data = np.arange(256, dtype=np.uint8).reshape(32, 8)
    weight = Nvfp4Weight(data, np.full((32, 1), 1, E4M3), np.float32(1))
    assert np.array_equal(
        decode(weight).reshape(-1, 2), np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], 1)
    )


def test_every_e4m3_code_but_the_two_nans():
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8).view(E4M3)
    scale = np.float32(0.37)
    got = decode(Fp8Weight(codes.reshape(2, -1), scale)).reshape(-1)
    assert np.array_equal(got, codes.astype(np.float32) * scale)
    assert got.dtype == np.float32
    blocks = decode(Nvfp4Weight(np.full((len(codes), 8), 0x22, np.uint8), codes.reshape(-1, 1), scale))
    assert np.array_equal(blocks[:, 0], codes.astype(np.float32) * scale)


def test_nvfp4_as_written_down():
    weight = random_nvfp4(6, 64)
    assert np.array_equal(decode(weight), naive_nvfp4(weight))


def test_large_tensors_are_decoded_in_chunks_to_the_same_bits():
    """The last chunk is not full."""
    weight = random_nvfp4(1040, 1040)
    whole = decode(weight)
    parts = [
        decode(Nvfp4Weight(weight.data[i : i + 104], weight.block_scale[i : i + 104], weight.global_scale))
        for i in range(0, 1040, 104)
    ]
    assert weight.block_scale.size > 8 * 2**13
    assert whole.tobytes() == np.concatenate(parts).tobytes()


def test_rows_of_a_fused_weight():
    weight = random_nvfp4(48, 32)
    rows = Nvfp4Weight(weight.data[16:32], weight.block_scale[16:32], weight.global_scale)
    assert np.array_equal(decode(rows), decode(weight)[16:32])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_plain_weights_widen_exactly(dtype):
    data = np.random.default_rng(0).standard_normal((3, 4)).astype(dtype)
    assert np.array_equal(decode(DenseWeight(data)), data.astype(np.float64))


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_equal_modelopts_own_dequantization_bit_for_bit(name):
    checkpoint = open_checkpoint(QUANTIZED / name)
    recorded = json.loads((QUANTIZED / f"{name}.json").read_text())["weights"]
    assert len(recorded) == (13 if name in {"mixed", "nvfp4-bf16-mtp"} else 21)
    for tensor, wanted in recorded.items():
        is_draft = tensor.startswith("mtp.")
        view = checkpoint.draft if is_draft else checkpoint.base
        values = decode(view.weight(tensor.removeprefix("mtp." if is_draft else "model.").removesuffix(".weight")))
        assert list(values.reshape(-1)[:4]) == wanted["first"], tensor
        assert hashlib.sha256(values.tobytes()).hexdigest() == wanted["sha256"], tensor


def cut(name: str) -> np.ndarray:
    """A packaged tensor cut as the script of the fixtures cuts it."""
    tensor = read_shard(TINY / "model.safetensors")[name]
    if name == "mtp.fc.weight":
        return np.concatenate([tensor[:128, :128], tensor[:128, 256:384]], axis=1)
    return tensor[:128, :256]


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        ("model.layers.2.mlp.down_proj", "model.language_model.layers.0.mlp.down_proj"),
        ("model.layers.2.linear_attn.out_proj", "model.language_model.layers.0.linear_attn.out_proj"),
        ("model.layers.3.self_attn.o_proj", "model.language_model.layers.1.self_attn.o_proj"),
        ("mtp.layers.0.mlp.down_proj", "mtp.layers.0.mlp.down_proj"),
        ("mtp.fc", "mtp.fc"),
    ],
)
def test_our_encoder_writes_modelopts_bytes(source, stored):
    """The larger tests quantize with it, so it must be ModelOpt's quantization."""
    exported = read_shard(QUANTIZED / "nvfp4" / "model.safetensors")
    ours = encode_nvfp4(cut(f"{source}.weight"))
    assert exported[f"{stored}.weight_scale_2"] == ours["weight_scale_2"]
    assert exported[f"{stored}.weight_scale"].tobytes() == ours["weight_scale"].tobytes()
    assert exported[f"{stored}.weight"].tobytes() == ours["weight"].tobytes()
