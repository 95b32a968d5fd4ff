"""A llama-architecture GGUF file to a Hugging Face folder: config, float16 weights, tokenizer, chat template.

    python bench/smollm2/convert.py MODEL.gguf FOLDER        needs gguf, numpy, safetensors, tokenizers

Quantized tensors are decoded by the gguf package. Two things differ between the formats besides names: GGUF files of
this architecture hold the rows of the query and key projections in rotary pairs (0, 1), (2, 3), ..., Hugging Face in
halves (0, d/2), (1, d/2 + 1), ...; and GGUF has the tokenizer as lists in its metadata.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[H * d, D] with each head's rows in rotary pairs -> the same with them in halves."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tensors(reader: GGUFReader, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """`heads` by GGUF's name of the projection. A tensor that has no place raises KeyError."""
    found = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = WHOLE.get(tensor.name)
        if name is None:
            _, layer, part, kind = tensor.name.split(".")
            name = f"model.layers.{layer}.{BLOCK[part]}.{kind}"
            if part in heads:
                weight = halves(weight, heads[part])
        found[name] = np.ascontiguousarray(weight.astype(np.float16))
    return found


def config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def of_model(name: str) -> Any:
        return fields[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": of_model("embedding_length"),
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": of_model("block_count"),
        "num_attention_heads": of_model("attention.head_count"),
        "num_key_value_heads": of_model("attention.head_count_kv"),
        "max_position_embeddings": of_model("context_length"),
        "rms_norm_eps": float(of_model("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(of_model("rope.freq_base")),
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with the pre-tokenizer that GGUF calls `smollm`: digits one by one, then GPT-2's expression."""
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"tokenizer.ggml.pre is {fields['tokenizer.ggml.pre']!r}, only 'smollm' is known")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    made.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL_TOKEN])
    return made


def convert(path: Path, folder: Path) -> None:
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = tensors(reader, heads)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens, template = fields["tokenizer.ggml.tokens"], fields["tokenizer.chat_template"]
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    written = {
        "config.json": config(fields, tied="lm_head.weight" not in weights),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": template},
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
