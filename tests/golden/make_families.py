"""Record what transformers computes for seeded tiny models of the dense families.

Run where torch and transformers are installed:  python tests/golden/make_families.py

Each model is saved as a Hugging Face folder (bfloat16) with `expected.npz`: token ids [B, N] and transformers' float32
logits [B, N, V] on exactly those weights. They stay under 300 KB each.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
COMMON = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "tiny-llama": (
        LlamaForCausalLM,
        LlamaConfig(
            **COMMON, **HEADS, head_dim=16, attention_bias=True, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False
        ),
    ),
    "tiny-qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **COMMON,
            **HEADS,
            head_dim=24,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            tie_word_embeddings=True,
        ),
    ),
}


def record(name: str) -> None:
    torch.manual_seed(20)
    kind, config = MODELS[name]
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: ones and zeros would hide a fault
            parameter.copy_(parameter + torch.randn_like(parameter) * 0.15)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    # Loaded anew: rounding the model also rounded its rotary frequencies, which are no weights.
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, config.vocab_size, (2, 40))
    with torch.no_grad():
        logits = model(ids).logits
    np.savez_compressed(folder / "expected.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy())
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(json.dumps({"name": name, "bytes": size, "max_abs_logit": float(logits.abs().max())}))


if __name__ == "__main__":
    for name in MODELS:
        record(name)
