"""Whole generations on the GPU, greedy, every batch size and draft length.

    python bench/gpu/generation.py [float16|fp8 ...]     the form of the KV cache
    python bench/gpu/generation.py record                what the reference engine writes with an FP8 cache (no GPU)

With a float16 cache the texts are held against what transformers recorded in float32, with an FP8 cache against the
reference engine running FP8. A first divergence is reported with the other side's gap between its two best logits
there. It is a near tie where the gap is smaller than float16 may close: at most 0.03, or twice the largest error of
such a gap that this run measures by reading the logits after prefixes of the recorded texts. Anything above is a fault.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from bench.gpu.harness import ROOT, TINY, save, say
from bench.gpu.tiny import GOLDEN, Generated, Networks, engine, run_prompts, spec, tiny_model
from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.load import EngineOptions
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.runtime.executor import PrefillChunk
from edgellm_worker.engine.runtime.reference import reference_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions

NEAR_TIE = 0.03
MOST_ROWS, MOST_DRAFTS, CHUNK, CAPACITY = 8, 5, 128, 1536
PROMPTS = [prompt["prompt_ids"] for prompt in GOLDEN["prompts"]]
RECORDED_FP8 = ROOT / "tests/golden/tiny_fp8_kv.json"
_CHECKED_POSITIONS = range(0, 64, 8)


@dataclass(frozen=True)
class Wanted:
    """`gaps[i]`: the difference of the two best logits where token i was chosen."""

    token_ids: list[int]
    gaps: list[float]


def wanted_texts(kv: KvDtype) -> list[Wanted]:
    if kv is KvDtype.FLOAT16:
        return [Wanted(prompt["generated_ids"], prompt["logit_gaps"]) for prompt in GOLDEN["prompts"]]
    return [Wanted(**given) for given in json.loads(RECORDED_FP8.read_text())]


def record() -> list[Wanted]:
    running = reference_engine(
        tiny_model(), EngineOptions(len(PROMPTS), CAPACITY, CAPACITY, SpeculativeConfig(0)), KvDtype.FP8
    )
    found = [Wanted([], []) for _ in PROMPTS]
    eos = frozenset(GOLDEN["eos_token_ids"])
    for row, prompt in enumerate(PROMPTS):
        params = SamplingParams(top_logprobs=2)
        running.add(row, GenerationRequest(tuple(prompt), GOLDEN["max_new_tokens"], params, eos))
    while running.num_rows:
        for update in running.step().updates:
            found[update.row_id].token_ids.extend(update.token_ids)
            for one in update.logprobs:
                best, second = sorted((value for _, value in one.top), reverse=True)[:2]
                found[update.row_id].gaps.append(round(best - second, 5))
    running.close()
    return found


def gap_errors(executor: TensorRtExecutor, wanted: Sequence[Wanted]) -> list[float]:
    """How far the engine's gap between the wanted token and the next best is from the wanted one, after prefixes."""
    errors = []
    for prompt, want in zip(PROMPTS, wanted, strict=True):
        for at in _CHECKED_POSITIONS:
            if at >= len(want.token_ids):
                break
            executor.clear(0)
            ids = np.array([*prompt, *want.token_ids[:at]], np.int32)
            scores = executor.prefill(0, PrefillChunk(ids, 0, None))
            logits = scores.read_logits(0, 0).astype(np.float64)
            own = logits[want.token_ids[at]]
            logits[want.token_ids[at]] = -np.inf
            errors.append(abs(float(own - logits.max()) - want.gaps[at]))
    return errors


def main(names: list[str]) -> int:
    if names == ["record"]:
        RECORDED_FP8.write_text(json.dumps([asdict(want) for want in record()]) + "\n")
        return 0
    faults = 0
    results: dict[str, object] = {}
    for name in names or ["float16", "fp8"]:
        rows, errors = generate(KvDtype(name))
        results[name] = {"runs": rows, "gap_errors": {"most": max(errors), "median": float(np.median(errors))}}
        faults += sum(len(row["faults"]) for row in rows)
    save("generation.json", results)
    return int(faults > 0)


def generate(kv: KvDtype) -> tuple[list[dict], list[float]]:
    level = int(os.environ.get("LEVEL", "1"))
    networks = Networks(tiny_model(), level, TINY)
    options = TensorRtOptions(CHUNK, use_graphs=os.environ.get("GRAPHS", "1") == "1")
    executor = networks.executor(replace(spec(MOST_ROWS, MOST_DRAFTS + 1, level), kv_dtype=kv), options)
    say(f"{len(networks.plans)} networks built in {networks.build_s:.1f} s; memory {dict(executor.memory_bytes)}")
    wanted = wanted_texts(kv)
    errors = gap_errors(executor, wanted)
    bound = max(NEAR_TIE, 2 * max(errors))
    say(f"kv {kv}: gaps of {len(errors)} positions are off by {np.median(errors):.4f}, at most {max(errors):.4f}")
    rows = []
    for num_drafts in (0, 1, 3, 5):
        for batch in (1, 2, 4, 8) if num_drafts != 3 else range(1, MOST_ROWS + 1):
            found, seconds = run_prompts(engine(executor, num_drafts), PROMPTS, batch, GOLDEN["max_new_tokens"])
            result = {"drafts": num_drafts, "batch": batch, **compare(found, wanted, bound), **rates(found, seconds)}
            rows.append(result)
            say(
                f"kv {kv} drafts {num_drafts} batch {batch}: {result['equal']}/{len(found)} equal,"
                f" near ties {result['near_ties']}, faults {result['faults']},"
                f" accepted {result['acceptance']:.3f}, {result['tokens_per_s']:.0f} tok/s"
            )
    executor.close()
    return rows, errors


def compare(found: Sequence[Generated], wanted: Sequence[Wanted], bound: float) -> dict:
    near_ties, faults = [], []
    for index, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got.token_ids == want.token_ids:
            continue
        pairs = zip(got.token_ids, want.token_ids, strict=False)
        at = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), -1)
        gap = want.gaps[at]
        (near_ties if at >= 0 and gap < bound else faults).append((index, at, round(gap, 4)))
    return {"equal": len(found) - len(near_ties) - len(faults), "near_ties": near_ties, "faults": faults}


def rates(found: Sequence[Generated], seconds: float) -> dict:
    drafted = sum(row.num_drafted for row in found)
    return {
        "acceptance": sum(row.num_accepted for row in found) / drafted if drafted else 0.0,
        "tokens_per_s": sum(len(row.token_ids) for row in found) / seconds,
    }


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
