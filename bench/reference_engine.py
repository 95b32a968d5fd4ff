"""The reference engine on the tiny checkpoint: batched drafting against the same requests one at a time, undrafted.

    python bench/reference_engine.py

The ratio of batch 4 with 3 drafts over batch 1 with none, by the sweep that `edgellm-worker bench` does (which prints
the whole table), on 16 recorded chat prompts. One core; times are the thread's CPU time, so that a busy machine does
not count. Every cell has to write the same texts. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import time
from pathlib import Path

import edgellm_worker
from edgellm_worker.bench import PLAIN, Cell, SweepPlan, drafts_name, sweep
from edgellm_worker.engine.api import Engine, GenerationRequest
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

ROOT = Path(__file__).parents[1]
CHECKPOINT = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
PROMPTS = ROOT / "tests" / "golden" / "tiny_qwen3_5_mtp.json"
TARGET_RATIO = 3.0
BATCHED = Cell(4, SpeculativeConfig(3))


def load_requests(num_requests: int) -> list[GenerationRequest]:
    """The chat prompts first: what a fleet would send."""
    data = json.loads(PROMPTS.read_text())
    prompts = sorted(data["prompts"], key=lambda prompt: (prompt["kind"] != "chat", len(prompt["prompt_ids"])))
    eos = frozenset(data["eos_token_ids"])
    return [GenerationRequest(tuple(prompt["prompt_ids"]), 64, eos_token_ids=eos) for prompt in prompts[:num_requests]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    arguments = parser.parse_args()
    plan = SweepPlan((1, BATCHED.batch_size), (PLAIN.drafting, BATCHED.drafting), arguments.repeats)
    checkpoint = open_checkpoint(CHECKPOINT)

    def open_engine(drafting: SpeculativeConfig) -> Engine:
        return load_engine("reference", checkpoint, EngineOptions(plan.max_batch_size, 1024, 2048, drafting))

    requests = load_requests(arguments.requests)
    result = sweep(plan, open_engine, requests, time.thread_time)
    assert result.num_different_texts == 0, "cells wrote different texts"
    for summary in result.summaries():
        rate = summary.decode_tokens_per_s
        print(
            f"batch {summary.batch_size}, {summary.drafts} drafts: {rate.median:.1f} decode tokens/s"
            f" ({rate.least:.1f} to {rate.most:.1f}), accepted {summary.acceptance.median:.3f}"
        )
    ratio = result.ratio(BATCHED, PLAIN)
    name = f"batch {BATCHED.batch_size}, {drafts_name(BATCHED.drafting)} drafts over batch 1, 0 drafts"
    print(f"{name}: {ratio.median:.2f}x ({ratio.least:.2f} to {ratio.most:.2f}); at least {TARGET_RATIO}")
    print(json.dumps({"ratio": round(ratio.median, 3), "target": TARGET_RATIO, "requests": len(requests)}))


if __name__ == "__main__":
    main()
