"""Quantized checkpoints generate what they should: against transformers, against their plain twins, and at full size.

The fixtures' ids were recorded from transformers in float32 with the weights that ModelOpt's own dequantization gives, the
KV cache through ModelOpt's own quantizers where it is FP8 (make_quantized.py).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edgellm_worker.engine.checkpoint.decode import decode
from edgellm_worker.engine.checkpoint.layout import Namespace
from edgellm_worker.engine.checkpoint.view import WeightView
from edgellm_worker.engine.checkpoint.weights import DenseWeight, Nvfp4Weight, Weight
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import read_model
from edgellm_worker.engine.runtime.reference import open_engine, reference_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from tests.support.checkpoint_files import FolderMaker, encode_nvfp4, linears, quantize, read_shard
from tests.support.tiny_engine import CHECKPOINT, short_prompts, watch

QUANTIZED = Path(__file__).parent / "quantized"
FIXTURES = ("fp8-fp8-kv", "fp8-nvfp4-mtp", "mixed", "nvfp4", "nvfp4-bf16-mtp", "nvfp4-fp8-mtp")
NUM_DRAFTS = 4
NEW_TOKENS = 6


@dataclass(frozen=True)
class Generated:
    token_ids: list[int]
    draft_ids: list[int]
    top: dict[int, float]  # logprobs of the first token's best five


def options(num_drafts: int, capacity: int = 64) -> EngineOptions:
    return EngineOptions(4, capacity, capacity, SpeculativeConfig(num_drafts))


def run_alone(checkpoint: Checkpoint, prompt_ids: list[int]) -> Generated:
    engine = open_engine(checkpoint, options(NUM_DRAFTS))
    watched = watch(engine)
    engine.add(0, GenerationRequest(tuple(prompt_ids), NEW_TOKENS, SamplingParams(top_logprobs=5)))
    tokens, logprobs = [], []
    while engine.num_rows:
        for update in engine.step().updates:
            assert update.error is None
            tokens += update.token_ids
            logprobs += update.logprobs
    return Generated(tokens, watched.rounds[0][1].drafts[0].tolist(), dict(logprobs[0].top))


@pytest.mark.parametrize("name", FIXTURES)
def test_ids_drafts_and_logits_as_transformers_has_them(name):
    checkpoint = open_checkpoint(QUANTIZED / name)
    prompts = json.loads((QUANTIZED / f"{name}.json").read_text())["prompts"]
    assert len(prompts) >= 15
    worst = 0.0
    for prompt in prompts:
        got = run_alone(checkpoint, prompt["prompt_ids"])
        assert got.token_ids == prompt["generated_ids"]
        assert got.draft_ids == prompt["draft_ids"]
        (best, best_logit), *others = prompt["top_logits"]
        for token, logit in others:
            worst = max(worst, abs((got.top[token] - got.top[best]) - (logit - best_logit)))
    assert worst < 2e-3


def write_twin(name: str, folder: Path) -> Path:
    """The same model without weight quantization: what ModelOpt's dequantization gives, as plain float32 tensors."""
    source = open_checkpoint(QUANTIZED / name)
    stored = read_shard(QUANTIZED / name / "model.safetensors")
    sidecars = ("weight_scale", "weight_scale_2", "input_scale")
    plain = {key: value for key, value in stored.items() if not key.endswith(sidecars)}
    for (namespace, module), linear in source.base._resolution.linears.items():
        plain[linear.stored_as] = decode(source.view(namespace).weight(module))
    config = json.loads((QUANTIZED / name / "config.json").read_text())
    claims = json.loads((QUANTIZED / name / "hf_quant_config.json").read_text())["quantization"]
    del config["quantization_config"]
    kv = {"quant_algo": None, "kv_cache_quant_algo": claims["kv_cache_quant_algo"]}
    return FolderMaker(folder, config, plain, kv).write()


@pytest.mark.parametrize("name", FIXTURES)
def test_a_plain_twin_generates_the_same(name, tmp_path):
    quantized, twin = open_checkpoint(QUANTIZED / name), open_checkpoint(write_twin(name, tmp_path / "twin"))
    assert isinstance(twin.base.weight("layers.0.mlp.up_proj"), DenseWeight)
    assert twin.base.kv.scheme is quantized.base.kv.scheme
    for prompt in json.loads((QUANTIZED / f"{name}.json").read_text())["prompts"][:6]:
        assert run_alone(twin, prompt["prompt_ids"]) == run_alone(quantized, prompt["prompt_ids"])


# ---- acceptance at full size: the packaged checkpoint, its base quantized here with ModelOpt's own rounding


def full_size(folder: Path) -> Checkpoint:
    """NVFP4 base, BF16 draft, and a config that claims NVFP4 for everything, as real exports do."""
    tensors = read_shard(CHECKPOINT / "model.safetensors")
    modules = linears(tensors, "mlp.", "self_attn.", "in_proj_qkv", "in_proj_z", "out_proj")
    base = [module for module in modules if module.startswith("model.")]
    maker = FolderMaker(
        folder,
        json.loads((CHECKPOINT / "config.json").read_text()),
        quantize(tensors, base, encode_nvfp4),
        {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head", "*in_proj_a", "*in_proj_b"],
        },
    )
    return open_checkpoint(maker.write())


class ShortNames(WeightView):
    """The mutant: the draft's sidecars are looked up by short name (`mlp.down_proj`), so the base's first ones are found
    and BF16 bytes are decoded as packed NVFP4.
    """

    def weight(self, name: str) -> Weight:
        own = super().weight(name)
        short = name.split(".", 2)[-1]
        layers = range(len(self._model.config.layers))
        found = next((n for n in (f"layers.{i}.{short}" for i in layers) if self.base.has(f"{n}.weight")), None)
        other = None if found is None else self.base.weight(found)
        if not isinstance(other, Nvfp4Weight):
            return own
        packed = np.ascontiguousarray(own.data).view(np.uint8).reshape(-1)[: other.data.size]
        return Nvfp4Weight(packed.reshape(other.data.shape), other.block_scale, other.global_scale)


def first_draft_acceptance(checkpoint: Checkpoint, draft: WeightView) -> float:
    """Accepted over drafted with one draft a step, over recorded prompts, greedily."""
    model = read_model(checkpoint.model_config, checkpoint.base, draft)
    engine = reference_engine(model, options(1, 256))
    waiting = [GenerationRequest(one.prompt_ids, 32) for one in short_prompts(80)]
    num_drafted = num_accepted = 0
    while waiting or engine.num_rows:
        while waiting and engine.num_rows < engine.limits.max_batch_size:
            engine.add(len(waiting), waiting.pop())
        for update in engine.step().updates:
            num_drafted += update.num_drafted
            num_accepted += update.num_accepted
    assert num_drafted > 200
    return num_accepted / num_drafted


def test_acceptance_of_a_bf16_draft_under_an_nvfp4_base(tmp_path):
    """Within 0.05 of the unquantized checkpoint's at the first position; the short-name mutant loses nearly all of it."""
    plain = open_checkpoint(CHECKPOINT)
    quantized = full_size(tmp_path / "checkpoint")
    assert isinstance(quantized.base.weight("layers.0.mlp.down_proj"), Nvfp4Weight)
    assert quantized.draft.weight("layers.0.mlp.down_proj").data.dtype == ml_dtypes.bfloat16
    mutant = ShortNames(Namespace.MTP, quantized.draft._model, quantized.draft._shards, quantized.base)
    wanted = first_draft_acceptance(plain, plain.draft)
    got = first_draft_acceptance(quantized, quantized.draft)
    broken = first_draft_acceptance(quantized, mutant)
    assert math.isclose(got, wanted, abs_tol=0.05)
    assert broken < 0.1
    print(f"first-draft acceptance: plain {wanted:.3f}, NVFP4 base {got:.3f}, short names {broken:.3f}")
