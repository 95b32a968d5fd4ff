"""Whole generations of quantized checkpoints on the GPU against the reference engine: greedy, in batches, with drafts.

    python bench/gpu/quantized_generation.py [FIXTURE ...]     with $KERNELS set, without TensorRT

The checkpoints are ModelOpt's exports under tests/golden/quantized. Weights stay packed: their products run in this
package's kernel, in steps and in prefill. Where the two first differ, the reference's own gap between its best two
tokens says whether float16 may choose the other (under 0.03), as in generation.py.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.gpu.harness import ROOT, NoNetworks, save, say
from bench.gpu.tiny import Generated, Networks, run_prompts, spec
from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, SamplingParams
from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from edgellm_worker.engine.checkpoint.quantization import KvScheme
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Op
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.draft_length import FixedDraftLength
from edgellm_worker.engine.runtime.reference import open_engine
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine, SpeculativeOptions
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions

QUANTIZED = ROOT / "tests/golden/quantized"
FIXTURES = ("nvfp4", "fp8-fp8-kv", "mixed", "nvfp4-fp8-mtp", "fp8-nvfp4-mtp", "nvfp4-bf16-mtp")
NEAR_TIE = 0.03
MOST_ROWS, MOST_DRAFTS, CAPACITY, NEW_TOKENS = 4, 3, 256, 32
CHUNK = 16 if os.environ.get("KERNELS") else 64  # longer prompt pieces are networks' where weights are dense


@dataclass(frozen=True)
class Wanted:
    """`gaps[i]`: the difference of log-probability between the two best tokens where token i was chosen."""

    token_ids: list[int]
    gaps: list[float]


def reference(checkpoint: Checkpoint, prompt_ids: list[int]) -> Wanted:
    running = open_engine(checkpoint, EngineOptions(1, CAPACITY, CAPACITY, SpeculativeConfig(0)))
    running.add(0, GenerationRequest(tuple(prompt_ids), NEW_TOKENS, SamplingParams(top_logprobs=2)))
    found = Wanted([], [])
    while running.num_rows:
        for update in running.step().updates:
            found.token_ids.extend(update.token_ids)
            for one in update.logprobs:
                best, second = sorted((value for _, value in one.top), reverse=True)[:2]
                found.gaps.append(best - second)
    running.close()
    return found


def loop(executor: TensorRtExecutor, model: Model, num_drafts: int) -> SpeculativeEngine:
    limits = EngineLimits(
        MOST_ROWS, CAPACITY, CAPACITY, MOST_DRAFTS + 1, MOST_DRAFTS, num_drafts, model.config.vocab_size
    )
    traits = EngineTraits("tensorrt", True, True, True, "mtp")
    return SpeculativeEngine(executor, SpeculativeOptions(limits, traits, FixedDraftLength(num_drafts)))


class ForbiddenNetworks(NoNetworks):
    """With $KERNELS there is no TensorRT: then every product must be a kernel's."""

    def prepare(self, key: str, num_rows: int, *_arguments: object) -> Callable[[], None]:
        raise EngineError(f"network {key} for {num_rows} rows, and there is no TensorRT")


def open_executor(model: Model, wanted: EngineSpec, level: int) -> TensorRtExecutor:
    options = TensorRtOptions(CHUNK, lowering=wanted.lowering)
    if not os.environ.get("KERNELS"):
        return Networks(model, level).executor(wanted, options)
    executor = TensorRtExecutor(model, wanted.layout, Cuda(), ForbiddenNetworks(), wanted.reader(), options)
    executor.warm_up([MOST_DRAFTS])
    return executor


def num_packed(model: Model, wanted: EngineSpec) -> int:
    """Products of a verify pass that the packed kernel runs."""
    graph = Recorder(model, wanted.layout, wanted.reader()).verify(MOST_ROWS, MOST_DRAFTS + 1)
    return sum(node.op is Op.PACKED_LINEAR for node in graph.nodes)


def compare(found: list[Generated], wanted: list[Wanted]) -> tuple[int, list[tuple[int, int, float]], list[object]]:
    """-> how many are equal, (prompt, token, gap) of near ties and of faults."""
    near_ties, faults = [], []
    for index, (got, want) in enumerate(zip(found, wanted, strict=True)):
        pairs = list(zip(got.token_ids, want.token_ids, strict=False))
        at = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), -1)
        if at < 0:
            if len(got.token_ids) != len(want.token_ids):
                faults.append((index, len(pairs), 0.0))
            continue
        gap = want.gaps[at]
        (near_ties if gap < NEAR_TIE else faults).append((index, at, round(gap, 4)))
    return len(found) - len(near_ties) - len(faults), near_ties, faults


def run(name: str, level: int) -> list[dict[str, object]]:
    checkpoint = open_checkpoint(QUANTIZED / name)
    model = read_model(checkpoint.model_config, checkpoint.base, checkpoint.draft)
    prompts = [prompt["prompt_ids"] for prompt in json.loads((QUANTIZED / f"{name}.json").read_text())["prompts"]]
    wanted = [reference(checkpoint, prompt) for prompt in prompts]
    kv_dtype = KvDtype.FP8 if checkpoint.base.kv.scheme is KvScheme.FP8 else KvDtype.FLOAT16
    engine_spec = replace(spec(MOST_ROWS, MOST_DRAFTS + 1, level, CAPACITY, CHUNK), kv_dtype=kv_dtype, packs=True)
    executor = open_executor(model, engine_spec, level)
    packed = num_packed(model, engine_spec)
    rows: list[dict[str, object]] = []
    for num_drafts in (0, MOST_DRAFTS):
        for batch in (1, MOST_ROWS):
            found, _ = run_prompts(loop(executor, model, num_drafts), prompts, batch, NEW_TOKENS, stops=False)
            equal, near_ties, faults = compare(found, wanted)
            say(
                f"{name}: {packed} packed products, {num_drafts} drafts, batch {batch}: {equal}/{len(prompts)} equal,"
                f" near ties {near_ties}, faults {faults}"
            )
            rows.append({
                "fixture": name, "packed": packed, "drafts": num_drafts, "batch": batch, "equal": equal,
                "prompts": len(prompts), "near_ties": near_ties, "faults": faults,
            })  # fmt: skip
    executor.close()
    if not packed:
        rows.append({"fixture": name, "faults": ["no product was packed"]})
    return rows


def main(names: list[str]) -> int:
    """Several fixtures are as many processes at once."""
    if len(names) != 1:
        children = [subprocess.Popen([sys.executable, __file__, name]) for name in names or FIXTURES]
        codes = [child.wait() for child in children]
        return int(any(codes))
    logging.basicConfig(level=logging.INFO)
    (name,) = names
    rows = run(name, int(os.environ.get("LEVEL", "1")))
    save(f"quantized_{name}.json", rows)
    num_faults = sum(len(row["faults"]) for row in rows)
    say(f"{name}: {len(rows)} runs, {num_faults} faults")
    return int(num_faults > 0)


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
