"""Make the quantized fixtures: NVIDIA ModelOpt quantizes and exports a cut of the packaged checkpoint.

    python make_quantized.py --model ../../worker/edgellm_worker/data/tiny-qwen3.5-mtp --out quantized

Needs torch (CPU), transformers 5.24, nvidia-modelopt 0.47. Two layers, half of the hidden size, a third of the
feed-forward and 512 tokens are kept, so that a fixture is under 1 MB; such a model writes no sense. transformers drops `mtp.` tensors, so the
draft is hung under the model as `mtp`: ModelOpt then quantizes, calibrates and exports it as it does any module.

Beside each checkpoint stands what others than this product computed from the exported files: the SHA-256 and some values
of every weight as ModelOpt's own tensors dequantize it, and the greedy and draft ids that transformers writes with
those weights in float32. Where the KV cache is FP8, ModelOpt's own KV quantizers stand in the attention.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import shutil
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

LAYERS = (2, 3)  # one Gated DeltaNet layer and the full-attention layer after it
HIDDEN, FULL_HIDDEN = 128, 256
INTERMEDIATE = 256
VOCAB = 512
SPECIAL = 3  # the last ids: <|endoftext|>, <|im_start|>, <|im_end|>
NUM_PROMPTS, NEW_TOKENS, DRAFTS = 24, 6, 4
MIN_GAP = 0.01  # prompts with a nearer second-best token are left out: float32 in another order may swap the two

NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FP8 = {"num_bits": (4, 3), "axis": None}
KV_FP8 = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": FP8}


def both(pattern: str, cfg: dict) -> list[dict]:
    """Weight and input quantizers of the modules that match."""
    return [{"quantizer_name": f"{pattern}{kind}_quantizer", "cfg": cfg} for kind in ("weight", "input")]


OFF = [
    {"quantizer_name": f"*{name}*", "enable": False}
    for name in ("lm_head", "embed_tokens", "conv1d", "in_proj_a", "in_proj_b")
]
NO_MTP = [{"quantizer_name": "*mtp.*", "enable": False}]

# Fixture -> (quantizer entries in order, prefixes that ModelOpt's exporter is told are an unquantized draft).
# "mixed" follows the public Qwen3.6-27B-NVFP4: FP8 attention, W4A16 NVFP4 feed-forward, FP8 KV, draft left alone.
FIXTURES: dict[str, tuple[list[dict], list[str]]] = {
    "nvfp4": ([*both("*", NVFP4), *OFF], []),
    "nvfp4-bf16-mtp": ([*both("*", NVFP4), *OFF, *NO_MTP], ["mtp", "mtp.layers.0"]),
    "fp8-fp8-kv": ([*both("*", FP8), *OFF, KV_FP8], []),
    "mixed": (
        [
            *both("*_attn.*", FP8),
            {"quantizer_name": "*mlp.*weight_quantizer", "cfg": NVFP4},
            *OFF,
            *NO_MTP,
            {"quantizer_name": "*layers.*[kv]_bmm_quantizer", "cfg": FP8},
            {"quantizer_name": "*mtp.*[kv]_bmm_quantizer", "enable": False},
        ],
        ["mtp", "mtp.layers.0"],
    ),
    "nvfp4-fp8-mtp": ([*both("*", NVFP4), *OFF, *NO_MTP, *both("*mtp.*", FP8)], []),
    "fp8-nvfp4-mtp": ([*both("*", FP8), *OFF, *NO_MTP, *both("*mtp.*", NVFP4)], []),
}


class Mtp(nn.Module):
    """The `mtp.*` tensors, of transformers' own layers."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        one = copy.deepcopy(config)
        one.num_hidden_layers, one.layer_types = 1, ["full_attention"]
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(one, 0)])
        self.norm = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def fuse(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1))


def cut_config(source: Path) -> Qwen3_5TextConfig:
    config = Qwen3_5TextConfig.from_pretrained(source)
    config.update(
        {
            "num_hidden_layers": len(LAYERS),
            "layer_types": [config.layer_types[i] for i in LAYERS],
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "vocab_size": VOCAB,
            "eos_token_id": VOCAB - 1,
            "pad_token_id": VOCAB - SPECIAL,
            "architectures": ["Qwen3_5ForCausalLM"],
            "dtype": "bfloat16",
        }
    )
    config._attn_implementation = "eager"
    return config


def cut_tensors(source: Path) -> dict[str, torch.Tensor]:
    """The packaged tensors cut to size; base layers renumbered."""
    stored = load_file(source / "model.safetensors")
    kept = {new: tensor for name, tensor in stored.items() if (new := renumbered(name)) is not None}
    return {name: cut_hidden(name, cut_size(name, tensor)).contiguous() for name, tensor in kept.items()}


def renumbered(name: str) -> str | None:
    """The name with its base layer counted anew; None for a layer that is not kept."""
    if not name.startswith("model.layers."):
        return name
    old, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"model.layers.{LAYERS.index(int(old))}.{rest}" if int(old) in LAYERS else None


def cut_size(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Fewer tokens and a narrower feed-forward."""
    if name == "model.embed_tokens.weight":
        return torch.cat([tensor[: VOCAB - SPECIAL], tensor[-SPECIAL:]])
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return tensor[:INTERMEDIATE]
    return tensor[:, :INTERMEDIATE] if name.endswith("down_proj.weight") else tensor


def cut_hidden(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The first half of the hidden channels, wherever they are: rows of what writes them, columns of what reads them."""
    writes = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc.weight")
    if name == "mtp.fc.weight":
        tensor = torch.cat([tensor[:, :HIDDEN], tensor[:, FULL_HIDDEN : FULL_HIDDEN + HIDDEN]], dim=1)
    if name.endswith(writes) or (tensor.ndim == 1 and len(tensor) == FULL_HIDDEN):
        return tensor[:HIDDEN]
    return tensor[:, :HIDDEN] if tensor.ndim == 2 else tensor


def build(config: Qwen3_5TextConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Qwen3_5ForCausalLM:
    model = Qwen3_5ForCausalLM(config)
    model.mtp = Mtp(config)
    tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    model.load_state_dict(tensors, strict=True)
    model.tie_weights()
    return model.to(dtype).eval()


def mtp_states(model: Qwen3_5ForCausalLM, x: torch.Tensor) -> torch.Tensor:
    """The draft layer over all its inputs at once, after mtp.norm."""
    positions = torch.arange(x.shape[1])
    rotary = Qwen3_5TextRotaryEmbedding(config=model.config)
    cos, sin = rotary(torch.zeros(1), positions[None, None].expand(3, 1, -1))
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    embeddings = (cos[:1].to(x.dtype), sin[:1].to(x.dtype))
    return model.mtp.norm(model.mtp.layers[0](x, position_embeddings=embeddings, attention_mask=mask))


@torch.no_grad()
def hidden_states(model: Qwen3_5ForCausalLM, ids: list[int]) -> torch.Tensor:
    return model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state


@torch.no_grad()
def calibrate(model: Qwen3_5ForCausalLM, prompts: list[list[int]]) -> None:
    for ids in prompts:
        hidden = hidden_states(model, ids)
        embeds = model.model.embed_tokens(torch.tensor([ids[1:]]))
        mtp_states(model, model.mtp.fuse(embeds, hidden[:, :-1]))


@torch.no_grad()
def generate(model: Qwen3_5ForCausalLM, prompt: list[int]) -> dict:
    """Greedy ids by whole recomputation, and the chain of drafts after the first of them; gaps to the second best."""
    ids, gaps = list(prompt), []
    for _ in range(NEW_TOKENS):
        best = model.lm_head(hidden_states(model, ids))[0, -1].topk(2)
        gaps.append(round(float(best.values[0] - best.values[1]), 5))
        ids.append(int(best.indices[0]))
    hidden = hidden_states(model, prompt)
    embed = model.model.embed_tokens
    x = model.mtp.fuse(embed(torch.tensor([[*prompt[1:], ids[len(prompt)]]])), hidden)
    drafts, draft_gaps = [], []
    for _ in range(DRAFTS):
        state = mtp_states(model, x)[:, -1:]
        best = model.lm_head(state)[0, -1].topk(2)
        drafts.append(int(best.indices[0]))
        draft_gaps.append(round(float(best.values[0] - best.values[1]), 5))
        x = torch.cat([x, model.mtp.fuse(embed(torch.tensor([drafts[-1:]])), state)], dim=1)
    return {
        "prompt_ids": prompt,
        "generated_ids": ids[len(prompt) :],
        "gaps": gaps,
        "draft_ids": drafts,
        "draft_gaps": draft_gaps,
        "top_logits": top_logits(model, prompt),
    }


@torch.no_grad()
def top_logits(model: Qwen3_5ForCausalLM, prompt: list[int]) -> list[list[float]]:
    """[id, logit] of the five best tokens after the prompt."""
    best = model.lm_head(hidden_states(model, prompt))[0, -1].topk(5)
    return [[int(index), round(float(value), 5)] for index, value in zip(best.indices, best.values, strict=True)]


def dequantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The exported tensors as plain float32 ones, by ModelOpt's own quantized tensor classes."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight":
            if leaf in {"A_log", "dt_bias"}:
                plain[name] = tensor.float()
            continue
        if tensor.dtype == torch.uint8:
            shape = torch.Size((tensor.shape[0], tensor.shape[1] * 2))
            plain[name] = NVFP4QTensor(shape, torch.float32, tensor).dequantize(
                dtype=torch.float32,
                scale=tensors[f"{module}.weight_scale"],
                double_scale=tensors[f"{module}.weight_scale_2"],
                block_sizes={-1: 16},
            )
        elif tensor.dtype == torch.float8_e4m3fn:
            plain[name] = FP8QTensor(tensor.shape, torch.float32, tensor).dequantize(
                dtype=torch.float32,
                scale=tensors[f"{module}.weight_scale"],
                block_sizes={},
            )
        else:
            plain[name] = tensor.float()
    return plain


def with_kv_quantizers(model: Qwen3_5ForCausalLM, tensors: dict[str, torch.Tensor], prompts: list[list[int]]) -> None:
    """ModelOpt's KV quantizers alone, at the exported scales; a layer without one has scale 1."""
    entries = [{"quantizer_name": "*", "enable": False}, KV_FP8]
    mtq.quantize(model, {"quant_cfg": entries, "algorithm": "max"}, lambda m: calibrate(m, prompts))
    for name, module in model.named_modules():
        for kind in ("k", "v"):
            quantizer = getattr(module, f"{kind}_bmm_quantizer", None)
            if quantizer is not None:
                scale = tensors.get(f"{name}.{kind}_proj.{kind}_scale", torch.tensor(1.0))
                quantizer.amax = scale.float() * 448.0


def record(out: Path, config: Qwen3_5TextConfig, prompts: list[list[int]]) -> dict:
    stored = load_file(out / "model.safetensors")  # ModelOpt's exporter gives the base the hub's multimodal prefix
    tensors = {name.replace("model.language_model.", "model."): tensor for name, tensor in stored.items()}
    plain = dequantize(tensors)
    model = build(config, plain, torch.float32)
    claims = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    if claims["kv_cache_quant_algo"] == "FP8":
        with_kv_quantizers(model, tensors, prompts)
    weights = {}
    for name, tensor in sorted(plain.items()):
        if name.removesuffix(".weight") + ".weight_scale" in tensors:
            flat = tensor.contiguous().numpy()
            weights[name] = {
                "sha256": hashlib.sha256(flat.tobytes()).hexdigest(),
                "first": [float(value) for value in flat.reshape(-1)[:4]],
            }
    generated = [generate(model, ids) for ids in prompts]
    kept = [one for one in generated if min(one["gaps"] + one["draft_gaps"]) >= MIN_GAP]
    return {"weights": weights, "prompts": kept}


def cut_tokenizer(source: Path, out: Path) -> None:
    """The first ids of the packaged tokenizer; its last three special tokens move to the end of the cut."""
    value = json.loads((source / "tokenizer.json").read_text())
    vocab = value["model"]["vocab"]
    value["model"]["vocab"] = {token: index for token, index in vocab.items() if index < VOCAB - SPECIAL}
    kept = value["model"]["vocab"]
    pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in value["model"]["merges"])
    value["model"]["merges"] = [pair for pair in pairs if all(part in kept for part in (*pair, "".join(pair)))]
    value["added_tokens"] = value["added_tokens"][-SPECIAL:]
    for index, token in enumerate(value["added_tokens"]):
        token["id"] = VOCAB - SPECIAL + index
    (out / "tokenizer.json").write_text(json.dumps(value, ensure_ascii=False))


def dump(value: dict) -> str:
    """JSON with one weight or prompt a line."""
    rows = {
        "weights": [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in value["weights"].items()],
        "prompts": [json.dumps(one) for one in value["prompts"]],
    }
    weights, prompts = (",\n  ".join(rows[key]) for key in ("weights", "prompts"))
    return f'{{\n "weights": {{\n  {weights}\n }},\n "prompts": [\n  {prompts}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = cut_tensors(args.model)
    draw = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, VOCAB - SPECIAL, (size,), generator=draw).tolist() for size in range(3, 3 + NUM_PROMPTS)
    ]
    for name, (entries, draft_prefixes) in FIXTURES.items():
        config = cut_config(args.model)
        model = build(config, tensors, torch.bfloat16)
        if draft_prefixes:
            model._mtp_layer_prefixes = draft_prefixes
        off = [{"quantizer_name": "*", "enable": False}]
        mtq.quantize(model, {"quant_cfg": [*off, *entries], "algorithm": "max"}, lambda m: calibrate(m, prompts))
        out = args.out / name
        shutil.rmtree(out, ignore_errors=True)
        export_hf_checkpoint(model, torch.bfloat16, out)
        cut_tokenizer(args.model, out)
        expected = record(out, cut_config(args.model), prompts)
        (args.out / f"{name}.json").write_text(dump(expected))
        print(name, sum(path.stat().st_size for path in out.iterdir()))


if __name__ == "__main__":
    main()
