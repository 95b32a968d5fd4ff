"""The floors of the TensorRT engine, measured: ratios within one run on one GPU, with the absolute values.

python bench/gpu/floors.py [delta|dense|tiny ...]
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.gpu.dense_model import dense_model
from bench.gpu.harness import TINY, Device, save, say
from bench.gpu.tiny import GOLDEN, FullPace, Networks, engine, run_prompts, spec, tiny_model
from edgellm_worker.engine.api import GenerationRequest, SamplingParams
from edgellm_worker.engine.build.builder import RowRange, collecting_logger
from edgellm_worker.engine.build.bundle import BundleKey, ensure_bundle, read_bundle
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.api import DeltaInputs, DeltaPending
from edgellm_worker.engine.ops.graph import Dtype
from edgellm_worker.engine.ops.tensorrt import TensorRtOps
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.executor import RoundInput
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from edgellm_worker.engine.runtime.tensorrt_kernels import Mode
from edgellm_worker.engine.runtime.tensorrt_program import Engines

LEVEL = int(os.environ.get("LEVEL", "1"))


@dataclass(frozen=True)
class Floor:
    name: str
    value: float
    bound: float
    is_most: bool
    detail: str

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound if self.is_most else self.value >= self.bound


# --- gated delta rule at 27B shapes ---


def delta_floor() -> Iterator[Floor]:
    """48 layers' states in rotation, so that no cache holds them: 12.6 MB read and 12.6 MB written per call."""
    device, layers, batch, tokens = Device(level=0), 48, 4, 6
    hk, hv, dk, dv = 16, 48, 128, 128
    rng = np.random.default_rng(1)
    ops = TensorRtOps()
    feeds: dict[str, np.ndarray] = {}

    def value(name: str, *shape: int) -> object:
        feeds[name] = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        return ops.input(name, shape, Dtype.FLOAT32)

    q, k = value("q", batch, tokens, hk, dk), value("k", batch, tokens, hk, dk)
    v = value("v", batch, tokens, hv, dv)
    log_g, beta = value("log_g", batch, tokens, hv), value("beta", batch, tokens, hv)
    commit = ops.input("commit", (batch,), Dtype.INT32)
    feeds["commit"] = np.full(batch, 4, np.int32)
    feeds["log_g"] = -np.abs(feeds["log_g"])
    for layer in range(layers):
        state = value(f"state{layer}", batch, hv, dk, dv)
        pending = DeltaPending(
            value(f"pk{layer}", 2 * batch, tokens, hk, dk),
            value(f"pu{layer}", batch, tokens, hv, dv),
            value(f"pg{layer}", 2 * batch, tokens, hv),
        )
        feeds[f"pg{layer}"] = -np.abs(feeds[f"pg{layer}"])
        ops.gated_delta_rule(DeltaInputs(q, k, v, log_g, beta), state, pending, commit)
    program, bound = device.program(ops.graph({}), feeds, Mode.STEP)
    ms = device.time_ms(program.enqueue) / layers
    size = batch * hv * dk * dv * 4
    states = [bound[f"state{layer}"].pointer for layer in range(layers)]
    others = [device.cuda.allocate(size) for _ in range(layers)]

    def copies() -> None:
        for target, source in zip(others, states, strict=True):
            device.cuda.copy(target, source, size)

    copy_ms = device.time_ms(copies) / layers
    yield Floor(
        "gated delta rule, 27B shapes, batch 4 x 6 positions and the fold, over a copy of its state",
        ms / copy_ms, 4.0, True,
        f"{ms * 1e3:.1f} us against {copy_ms * 1e3:.1f} us ({2 * size / copy_ms / 1e9:.2f} TB/s)",
    )  # fmt: skip
    device.cuda.close()


# --- a dense model of 1.6 billion parameters ---


def round_input(rows: int, position: int, committed: int, width: int) -> RoundInput:
    pairs = np.random.default_rng(rows + position).integers(0, 8000, (rows, width)).astype(np.int32)
    full = np.full(rows, committed, np.int32)
    return RoundInput(pairs, full, np.full(rows, position, np.int32), full)


def device_ms(executor: TensorRtExecutor, rows: int, drafts: int, position: int = 300, repeats: int = 40) -> float:
    """Device time of one round's graph, by events."""
    batch = round_input(rows, position, 1, executor.rounds.block.width)
    for _ in range(3):
        executor.run_round(batch, drafts)
    one_pass = executor.rounds.pass_of(rows, drafts)
    times = []
    for _ in range(repeats):
        with executor._cuda.timer() as elapsed:
            one_pass.run()
        times.append(elapsed())
    return statistics.median(times)


def dense_floors() -> Iterator[Floor]:
    model = dense_model()
    slots, verify, chunk = 8, 6, 128
    networks = Networks(model, LEVEL)
    whole = spec(slots, verify, LEVEL, 2048, chunk)
    executor = networks.executor(whole, TensorRtOptions(chunk))
    say(f"dense: {len(networks.plans)} networks in {networks.build_s:.0f} s, {dict(executor.memory_bytes)}")
    plain = networks.executor(spec(slots, 1, LEVEL, 2048, chunk), TensorRtOptions(chunk))
    one = device_ms(plain, 1, 0)
    plain.close()
    verifier = VerifyOnly(executor)
    full = verifier.ms(4, 5)
    single = verifier.ms(1, 0)
    yield Floor(
        "verify at batch 4 x 6 positions over the same engine's step at 1 x 1", full / single, 1.15, True,
        f"{full:.3f} ms against {single:.3f} ms (an engine without a draft head: {one:.3f} ms a step)",
    )  # fmt: skip
    chain = chain_ms(model, 24)
    yield Floor(
        "verify at batch 4 x 6 over a chain of its matrix products run bare", full / chain, 1.3, True,
        f"{full:.3f} ms against {chain:.3f} ms",
    )  # fmt: skip
    yield from host_floors(executor)
    yield from pattern_floor(executor)
    executor.close()


class VerifyOnly:
    """The verify pass by itself, at the executor's own addresses."""

    def __init__(self, executor: TensorRtExecutor) -> None:
        self._executor = executor

    def ms(self, rows: int, drafts: int) -> float:
        executor = self._executor
        width = drafts + 1
        rounds, block = executor.rounds, executor.rounds.block
        block.fill(round_input(rows, 300, 1, block.width), drafts, range(rows), [0] * block.num_slots)
        recorded = executor.machine.recorder.verify(rows, width)
        program = rounds.lane.program(recorded, rounds.results.bindings(rows, width), rows, Mode.STEP)

        def enqueue() -> None:
            block.upload()
            program.enqueue()

        return graph_ms(executor, enqueue)


def graph_ms(executor: TensorRtExecutor, enqueue: Callable[[], None], repeats: int = 40) -> float:
    enqueue()
    executor._cuda.synchronize()
    graph = executor._cuda.capture(enqueue)
    times = []
    for index in range(repeats + 5):
        with executor._cuda.timer() as elapsed:
            graph.launch()
        took = elapsed()
        if index >= 5:
            times.append(took)
    return statistics.median(times)


def chain_ms(model: Model, rows: int) -> float:
    """The products of every layer and the head, nothing between them but what feeds one from the other."""
    device = Device(level=LEVEL)
    ops = TensorRtOps()
    hidden = ops.input("x", (1, rows, model.config.hidden_size), Dtype.FLOAT16)
    x = hidden
    for layer in model.base.layers:
        mixer = layer.mixer
        q, _, _ = ops.fused_linear(x, [mixer.query.weight, mixer.key.weight, mixer.value.weight], [None] * 3)
        x = ops.linear(q, mixer.out.weight)
        gate, _ = ops.fused_linear(x, [layer.mlp.gate.weight, layer.mlp.up.weight], [None] * 2)
        x = ops.linear(gate, layer.mlp.down.weight)
        x = ops.gather_rows(
            x, ops.input(f"i{id(layer)}", (1, rows), Dtype.INT32)
        )  # cuts the chain into one plan a layer
    graph = ops.graph({"y": ops.linear(x, model.base.head)})
    index = np.arange(rows, dtype=np.int32)[None]
    feeds = dict.fromkeys(graph.inputs, index)
    feeds["x"] = np.random.default_rng(3).standard_normal((1, rows, model.config.hidden_size)).astype(np.float16)
    program, _ = device.program(graph, feeds, Mode.STEP, device.parts(graph, (RowRange(1, rows, rows),)))
    launches = [launch for label, launch in program.launches if label.startswith("network")]  # gathers only cut

    def enqueue() -> None:
        for launch in launches:
            launch()

    ms = device.time_ms(enqueue)
    device.cuda.close()
    return ms


def host_floors(executor: TensorRtExecutor) -> Iterator[Floor]:
    """What a step of the product's loop takes beyond its graph, at batch 8, greedy and sampled."""
    drafts = 3
    device = device_ms(executor, 8, drafts, position=40)
    for name, params, bound in (
        ("greedy", SamplingParams(), 0.05),
        ("sampled", SamplingParams(temperature=0.8, top_k=20, seed=5), 0.3),
    ):
        running = engine(executor, drafts, 2048)
        for row in range(8):
            running.add(row, GenerationRequest((1, 2, 3, 4 + row), 400, params))
        while True:
            report = running.step()
            if report.num_speculative_tokens and report.num_rows == 8:
                break
        times = []
        for _ in range(60):
            began = time.perf_counter()
            running.step()
            times.append(1e3 * (time.perf_counter() - began))
        for row in range(8):
            running.remove(row)
        running.step()  # waits for the round under way
        step = statistics.median(times)
        extra = step - device
        value = extra / device if name == "greedy" else extra
        yield Floor(
            f"host time added to a {name} step at batch 8 ({'share of device time' if name == 'greedy' else 'ms'})",
            value, bound, True, f"step {step:.3f} ms, device {device:.3f} ms",
        )  # fmt: skip


def pattern_floor(executor: TensorRtExecutor) -> Iterator[Floor]:
    """4 rows together against one at a time, 3 drafts, accepted counts replayed from one fixed pattern."""
    pattern, drafts = (3, 2, 3, 0, 1, 3, 2, 3), 3

    def seconds(rows: int) -> float:
        position, committed = 100, 1
        executor.run_round(round_input(rows, position, 1, 6), drafts)
        executor.run_round(round_input(rows, position, 1, 6), drafts)
        began = time.perf_counter()
        for step in range(64):
            executor.run_round(round_input(rows, position, committed, 6), drafts)
            committed = pattern[step % len(pattern)] + 1
            position += committed
        return time.perf_counter() - began

    together, alone = seconds(4), seconds(1)
    yield Floor(
        "4 jobs together over one at a time, 1.6 billion dense, 3 drafts, fixed acceptance",
        4 * alone / together, 3.5, False,
        f"{1e3 * together / 64:.3f} ms a round of 4, {1e3 * alone / 64:.3f} ms of 1",
    )  # fmt: skip


# --- the tiny checkpoint ---


def tiny_floors() -> Iterator[Floor]:
    """Of 16 jobs the last runs alone for a ninth of all rounds. So they run four times over, and what counts is the
    time in which as many as may be are in flight. The detail has the whole runs too.
    """
    networks = Networks(tiny_model(), LEVEL, TINY)
    slots, chunk, new = 4, 128, 256
    prompts = [prompt["prompt_ids"] for prompt in GOLDEN["prompts"] if len(prompt["prompt_ids"]) < 1000][:16]
    rates: dict[tuple[int, int], float] = {}
    whole: dict[tuple[int, int], tuple[float, float]] = {}
    for verify, drafts, batches in ((4, 3, (1, 4)), (1, 0, (1, 4))):
        executor = networks.executor(spec(slots, verify, LEVEL, 1536, chunk), TensorRtOptions(chunk))
        for batch in batches:
            run_prompts(engine(executor, drafts), prompts[:4], batch, 8, stops=False)
            found, took = run_prompts(engine(executor, drafts), prompts, batch, new, stops=False)
            once, pace = len(prompts) * new / took, FullPace()
            found, took = run_prompts(engine(executor, drafts), prompts * 4, batch, new, stops=False, pace=pace)
            rates[drafts, batch] = pace.tokens / pace.seconds
            whole[drafts, batch] = (once, len(prompts) * 4 * new / took)
            drafted = sum(row.num_drafted for row in found)
            share = sum(row.num_accepted for row in found) / drafted if drafted else 0.0
            ms = device_ms(executor, batch, drafts, position=200)
            rounds = sum(row.num_rounds for row in found)
            say(
                f"tiny: drafts {drafts} batch {batch}: {rates[drafts, batch]:.0f} tok/s, accepted {share:.3f},"
                f" device {ms:.3f} ms a round, {1e3 * took * batch / rounds:.3f} ms of wall clock"
            )
        executor.close()
    pairs = zip(whole[3, 4], whole[3, 1], strict=True)
    yield Floor(
        "4 jobs together over one at a time, tiny checkpoint, 3 drafts", rates[3, 4] / rates[3, 1], 3.5, False,
        f"{rates[3, 4]:.0f} against {rates[3, 1]:.0f} tokens/s; until the last job has ended: "
        + ", ".join(f"{four:.0f} against {one:.0f} ({four / one:.3f})" for four, one in pairs),
    )  # fmt: skip
    yield Floor(
        "3 drafts over none, tiny checkpoint, batch 1", rates[3, 1] / rates[0, 1], 1.8, False,
        f"{rates[3, 1]:.0f} against {rates[0, 1]:.0f} tokens/s (batch 4: {rates[3, 4]:.0f} against {rates[0, 4]:.0f})",
    )  # fmt: skip


# --- bundles ---


def bundle_floor() -> Iterator[Floor]:
    """The tiny checkpoint's plans as a cached bundle: read and checked, against its files read and nothing else."""
    networks = Networks(tiny_model(), LEVEL, TINY)
    networks.executor(spec(4, 4, LEVEL), TensorRtOptions()).close()
    key = BundleKey("bench", "gpu", {"purpose": "floor"})

    def write(out: Path) -> None:
        for name, plan in networks.plans.items():
            (out / f"{name}.plan").write_bytes(plan)

    with tempfile.TemporaryDirectory() as cache:
        bundle, _ = ensure_bundle(Path(cache), key, write)
        files = sorted(bundle.path.iterdir())
        size = sum(file.stat().st_size for file in files)
        times: dict[str, list[float]] = {}
        for _ in range(50):
            for name, is_cold, work in (
                ("read", True, lambda: [file.read_bytes() for file in files]),
                ("load", True, lambda: read_bundle(bundle.path, key)),
                ("read again", False, lambda: [file.read_bytes() for file in files]),
                ("load again", False, lambda: read_bundle(bundle.path, key)),
            ):
                if is_cold:
                    forget(files)
                times.setdefault(name, []).append(milliseconds(work))
    with Cuda() as cuda:
        engines = Engines(networks.library, cuda, collecting_logger(networks.library))
        deserialized = milliseconds(lambda: engines.load(bundle.plans))
        engines.close()
    read, load, read_again, load_again = (statistics.median(given) for given in times.values())
    yield Floor(
        "loading a cached bundle over reading its files", load / read, 1.5, True,
        f"{load:.2f} ms against {read:.2f} ms, {len(files)} files of {size / 1e6:.1f} MB from the disk (out of the page"
        f" cache {load_again:.2f} against {read_again:.2f}); making engines of them takes {deserialized:.0f} ms",
    )  # fmt: skip


def forget(files: list[Path]) -> None:
    """Out of the page cache: what a worker that starts reads."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


PARTS = {"bundle": bundle_floor, "delta": delta_floor, "dense": dense_floors, "tiny": tiny_floors}


def main(names: list[str]) -> int:
    results: list[Floor] = []
    for name in names or list(PARTS):
        for floor in PARTS[name]():
            results.append(floor)
            sign = "<=" if floor.is_most else ">="
            word = "met   " if floor.is_met else "MISSED"
            say(f"{word} {floor.value:.3f} {sign} {floor.bound}  {floor.name}: {floor.detail}")
        save(f"floors_{name}.json", [{**vars(floor), "is_met": floor.is_met} for floor in results])
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
