"""The reference engine on the tiny checkpoint: batched drafting against the same jobs one at a time without drafts.

    python bench/reference_engine.py            the ratio: batch 4 with 3 drafts over batch 1 with none
    python bench/reference_engine.py --table    batch {1,2,4,8} x drafts {0,1,3,5,adaptive} as well

One core; times are the thread's CPU time, so that a busy machine does not count. Configurations run interleaved,
several repeats; medians with the spread (smallest to largest). "decode" counts tokens after the first of each job over
the time of rounds alone; "all" has the prompts in it. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import edgellm_worker
from edgellm_worker.engine.api import GenerationRequest, Phase
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.load import EngineOptions, load_engine
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

ROOT = Path(__file__).parents[1]
CHECKPOINT = Path(edgellm_worker.__file__).parent / "data" / "tiny-qwen3.5-mtp"
PROMPTS = ROOT / "tests" / "golden" / "tiny_qwen3_5_mtp.json"
TARGET_RATIO = 3.0


@dataclass(frozen=True)
class Setting:
    batch: int
    drafts: int
    adaptive: bool = False

    def __str__(self) -> str:
        return f"batch {self.batch}, {'adaptive' if self.adaptive else self.drafts} drafts"


@dataclass(frozen=True)
class Result:
    """`texts` are the jobs' tokens, to show that every setting wrote the same."""

    decode_tokens_per_s: float
    all_tokens_per_s: float
    acceptance: float
    mean_round_ms: float
    texts: tuple[tuple[int, ...], ...]


def run(setting: Setting, requests: list[GenerationRequest]) -> Result:
    speculative = SpeculativeConfig(setting.drafts, adaptive=setting.adaptive)
    options = EngineOptions(setting.batch, 1024, 2048, speculative)
    engine = load_engine("reference", open_checkpoint(CHECKPOINT), options)
    engine.add(-1, requests[0])  # weights are decoded at first use
    while engine.num_rows:
        engine.step()
    tokens: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    waiting, prefill_s, rounds_s = list(enumerate(requests)), 0.0, []
    drafted = accepted = 0
    while waiting or engine.num_rows:
        while waiting and engine.num_rows < setting.batch:
            engine.add(*waiting.pop(0))
        began = time.thread_time()
        report = engine.step()
        seconds = time.thread_time() - began
        if Phase.PREFILL in report.phase_s:
            prefill_s += seconds
        else:
            rounds_s.append(seconds)
        for update in report.updates:
            tokens[update.row_id] += update.token_ids
            drafted, accepted = drafted + update.num_drafted, accepted + update.num_accepted
    engine.close()
    total = sum(map(len, tokens.values()))
    decode_s = sum(rounds_s)
    return Result(
        decode_tokens_per_s=(total - len(requests)) / decode_s,
        all_tokens_per_s=total / (decode_s + prefill_s),
        acceptance=accepted / drafted if drafted else 0.0,
        mean_round_ms=1e3 * decode_s / len(rounds_s),
        texts=tuple(tuple(tokens[i]) for i in range(len(requests))),
    )


def load_requests(num_jobs: int) -> list[GenerationRequest]:
    """The chat prompts first: what a fleet would send."""
    data = json.loads(PROMPTS.read_text())
    prompts = sorted(data["prompts"], key=lambda prompt: (prompt["kind"] != "chat", len(prompt["prompt_ids"])))
    eos = frozenset(data["eos_token_ids"])
    return [GenerationRequest(tuple(prompt["prompt_ids"]), 64, eos_token_ids=eos) for prompt in prompts[:num_jobs]]


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):8.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=16)
    arguments = parser.parse_args()
    serial, batched = Setting(1, 0), Setting(4, 3)
    settings = [serial, batched]
    if arguments.table:
        grid = [
            Setting(b, k, a)
            for b in (1, 2, 4, 8)
            for k, a in ((0, False), (1, False), (3, False), (5, False), (5, True))
        ]
        settings += [setting for setting in grid if setting not in settings]
    requests = load_requests(arguments.jobs)
    results: dict[Setting, list[Result]] = {setting: [] for setting in settings}
    for _ in range(arguments.repeats):
        for setting in settings:
            results[setting].append(run(setting, requests))
    texts = {result.texts for of_setting in results.values() for result in of_setting}
    assert len(texts) == 1, "settings wrote different texts"
    print(f"{'setting':26} {'decode tokens/s':>30} {'all tokens/s':>30} {'accepted':>9} {'round ms':>9}")
    for setting in sorted(settings, key=lambda s: (s.batch, s.adaptive, s.drafts)):
        of_setting = results[setting]
        decode = summary([r.decode_tokens_per_s for r in of_setting])
        everything = summary([r.all_tokens_per_s for r in of_setting])
        round_ms = statistics.median(r.mean_round_ms for r in of_setting)
        print(f"{setting!s:26} {decode:>30} {everything:>30} {of_setting[0].acceptance:9.3f} {round_ms:9.2f}")
    pairs = zip(results[batched], results[serial], strict=True)
    ratios = [one.decode_tokens_per_s / other.decode_tokens_per_s for one, other in pairs]
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"decode, {batched} over {serial}: {ratio:.2f}x ({spread}); at least {TARGET_RATIO}")
    print(json.dumps({"ratio": round(ratio, 3), "target": TARGET_RATIO, "jobs": len(requests)}))


if __name__ == "__main__":
    main()
