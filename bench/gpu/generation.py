"""Whole generations on the GPU against what transformers recorded: greedy, every batch size and draft length.

    python bench/gpu/generation.py

A divergence is reported with the recorded gap between the best two logits where it happens. Gaps under 0.03 are where
float16 may legitimately choose the other token; anything above is a fault.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from bench.gpu.harness import TINY, save, say
from bench.gpu.tiny import GOLDEN, Networks, engine, run_prompts, spec, tiny_model
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtOptions

NEAR_TIE = 0.03
MOST_ROWS, MOST_DRAFTS, CHUNK = 8, 5, 128


def main() -> int:
    level = int(os.environ.get("LEVEL", "1"))
    networks = Networks(tiny_model(), level, TINY)
    options = TensorRtOptions(CHUNK, use_graphs=os.environ.get("GRAPHS", "1") == "1")
    executor = networks.executor(spec(MOST_ROWS, MOST_DRAFTS + 1, level), options)
    say(f"{len(networks.plans)} networks built in {networks.build_s:.1f} s; memory {dict(executor.memory_bytes)}")
    prompts = [prompt["prompt_ids"] for prompt in GOLDEN["prompts"]]
    rows, faults = [], 0
    for num_drafts in (0, 1, 3, 5):
        for batch in (1, 2, 4, 8) if num_drafts != 3 else range(1, MOST_ROWS + 1):
            found, seconds = run_prompts(engine(executor, num_drafts), prompts, batch, GOLDEN["max_new_tokens"])
            result = compare(found, num_drafts, batch, seconds)
            faults += len(result["faults"])
            rows.append(result)
            say(
                f"drafts {num_drafts} batch {batch}: {result['equal']}/{len(prompts)} equal,"
                f" near ties {result['near_ties']}, faults {result['faults']},"
                f" accepted {result['acceptance']:.3f}, {result['tokens_per_s']:.0f} tok/s"
            )
    save("generation.json", rows)
    executor.close()
    say(f"generation: {len(rows)} runs of {len(prompts)} prompts, {faults} faults")
    return int(faults > 0)


def compare(found: list, num_drafts: int, batch: int, seconds: float) -> dict:
    near_ties, faults = [], []
    for index, (got, prompt) in enumerate(zip(found, GOLDEN["prompts"], strict=True)):
        want = prompt["generated_ids"]
        if got.token_ids == want:
            continue
        at = next((i for i, pair in enumerate(zip(got.token_ids, want, strict=False)) if pair[0] != pair[1]), -1)
        gap = prompt["logit_gaps"][at]
        (near_ties if at >= 0 and gap < NEAR_TIE else faults).append((index, at, round(gap, 4)))
    drafted = sum(row.num_drafted for row in found)
    return {
        "drafts": num_drafts,
        "batch": batch,
        "equal": len(found) - len(near_ties) - len(faults),
        "near_ties": near_ties,
        "faults": faults,
        "acceptance": sum(row.num_accepted for row in found) / drafted if drafted else 0.0,
        "tokens_per_s": sum(len(row.token_ids) for row in found) / seconds,
    }


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
