"""The tiny checkpoint on the GPU: networks built once, executors for any layout, and a loop that runs prompts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.gpu.harness import ROOT, TINY, plans_folder, say
from edgellm_worker.engine.api import EngineLimits, EngineTraits, GenerationRequest, SamplingParams
from edgellm_worker.engine.build.builder import Builder, collecting_logger
from edgellm_worker.engine.build.bundle import compile_in_children
from edgellm_worker.engine.build.segments import Segment
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.checkpoint.checkpoint import open_checkpoint
from edgellm_worker.engine.models.config import read_config
from edgellm_worker.engine.models.registry import Model, read_model
from edgellm_worker.engine.ops.api import KvDtype
from edgellm_worker.engine.ops.graph import Lowering
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.draft_length import FixedDraftLength
from edgellm_worker.engine.runtime.speculative import SpeculativeEngine, SpeculativeOptions
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from edgellm_worker.engine.runtime.tensorrt_program import Engines
from edgellm_worker.engine.trt import Library, load_library

GOLDEN = json.loads((ROOT / "tests/golden/tiny_qwen3_5_mtp.json").read_text())


def tiny_model() -> Model:
    checkpoint = open_checkpoint(TINY)
    config = read_config(json.loads((TINY / "config.json").read_text()))
    return read_model(config, checkpoint.base, checkpoint.draft)


@dataclass
class Networks:
    """Plans of one model by structural key, shared by every layout, kept under $PLANS between runs where that is set.

    With a `model_dir` the product's builder processes compile them; without, this process does.
    """

    model: Model
    level: int
    model_dir: Path | None = None
    library: Library = field(default_factory=load_library)
    plans: dict[str, bytes] = field(default_factory=dict)
    build_s: float = 0.0

    def executor(self, spec: EngineSpec, options: TensorRtOptions) -> TensorRtExecutor:
        wanted = spec.segments(self.model, spec.reader())
        began = time.perf_counter()
        self._compile({key: segment for key, segment in wanted.items() if key not in self.plans}, spec)
        self.build_s += time.perf_counter() - began
        cuda = Cuda()
        engines = Engines(self.library, cuda, collecting_logger(self.library))
        engines.load({key: self.plans[key] for key in wanted})
        model = self.model if spec.max_verify > 1 else self.model.without_mtp()
        options = replace(options, lowering=spec.lowering)
        executor = TensorRtExecutor(model, spec.layout, cuda, engines, spec.reader(), options)
        executor.warm_up([spec.max_verify - 1])
        return executor

    def _compile(self, missing: dict[str, Segment], spec: EngineSpec) -> None:
        folder = plans_folder(self.level)
        tuning = "_".join(f"{r.least}-{r.typical}-{r.most}" for r in spec.ranges)
        for key in [key for key in missing if folder is not None and (folder / f"{key}_{tuning}.plan").exists()]:
            self.plans[key] = (folder / f"{key}_{tuning}.plan").read_bytes()
            del missing[key]
        if not missing:
            return
        if self.model_dir is not None and not self.plans:
            with tempfile.TemporaryDirectory() as out:
                count = len(spec.segments(self.model, spec.reader()))
                compile_in_children(self.model_dir, spec, self.library, count, Path(out, "log"))(Path(out))
                made = {plan.stem: plan.read_bytes() for plan in Path(out).glob("*.plan")}
        else:
            builder = Builder(self.library, spec.settings)
            made = {key: self._timed(builder, segment, spec) for key, segment in missing.items()}
        for key, plan in made.items():
            if folder is not None:
                (folder / f"{key}_{tuning}.plan").write_bytes(plan)
        self.plans.update(made)

    def _timed(self, builder: Builder, segment: Segment, spec: EngineSpec) -> bytes:
        began = time.perf_counter()
        plan = builder.compile(segment, spec.ranges)
        say(f"  network of {len(segment.nodes)} ops in {time.perf_counter() - began:.1f} s, {len(plan) / 1e6:.1f} MB")
        return plan


def spec(num_slots: int, max_verify: int, level: int, capacity: int = 1536, chunk: int = 128) -> EngineSpec:
    lowering = Lowering(os.environ.get("LOWERING", "products"))
    return EngineSpec(num_slots, capacity, max_verify, KvDtype.FLOAT16, chunk, level, lowering=lowering)


def engine(executor: TensorRtExecutor, num_drafts: int, capacity: int = 1536) -> SpeculativeEngine:
    """The product's own loop over an executor that the caller keeps."""
    limits = EngineLimits(executor.num_slots, 1300, capacity, 6, 5, max(num_drafts, 0), 8192)
    traits = EngineTraits("tensorrt", True, True, True, "mtp")
    return SpeculativeEngine(executor, SpeculativeOptions(limits, traits, FixedDraftLength(num_drafts)))


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class FullPace:
    """Tokens, and seconds from the start, up to the moment when a row ended and none was left to take its place."""

    tokens: int = 0
    seconds: float = 0.0


def run_prompts(
    running: SpeculativeEngine,
    prompts: Sequence[Sequence[int]],
    most_rows: int,
    max_new: int,
    *,
    stops: bool = True,
    pace: FullPace | None = None,
) -> tuple[list[Generated], float]:
    """All prompts, at most `most_rows` at a time, in flight -> (what each gave, seconds). `pace` is filled."""
    eos = frozenset(GOLDEN["eos_token_ids"]) if stops else frozenset()
    found = [Generated() for _ in prompts]
    waiting = list(range(len(prompts)))[::-1]
    active: set[int] = set()
    num_tokens = 0
    began = time.perf_counter()
    while waiting or active:
        while waiting and len(active) < most_rows:
            index = waiting.pop()
            request = GenerationRequest(tuple(prompts[index]), max_new, SamplingParams(), eos)
            running.add(index, request)
            active.add(index)
        for update in running.step().updates:
            if update.error is not None:
                raise RuntimeError(f"prompt {update.row_id}: {update.error}")
            row = found[update.row_id]
            row.token_ids += update.token_ids
            num_tokens += len(update.token_ids)
            row.num_rounds += update.is_verify
            row.num_drafted += update.num_drafted
            row.num_accepted += update.num_accepted
            if update.finish_reason is not None:
                active.discard(update.row_id)
        if pace is not None and (waiting or len(active) == most_rows):
            pace.tokens, pace.seconds = num_tokens, time.perf_counter() - began
    return found, time.perf_counter() - began
