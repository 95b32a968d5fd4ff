"""Where a verify step's device time goes: every kind of launch timed alone, as a graph of its launches in order.

python bench/gpu/profile.py [dense|tiny ...]      with ONCE=1 one step of each, launch by launch, for a profiler
                                                  with KERNELS=1 the kernels alone, which needs no TensorRT

A kind's row is the median of device events around a graph that holds only that kind's launches; "all" is the step
itself, "empty" the same number of launches of a kernel that does nothing. What the kinds together take more than "all"
is what their launches overlap.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
from collections.abc import Callable, Iterator

import numpy as np

from bench.gpu.dense_model import dense_model
from bench.gpu.floors import LEVEL, chain_ms, graph_ms, round_input
from bench.gpu.harness import TINY, NoNetworks, save, say
from bench.gpu.tiny import Networks, spec, tiny_model
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.executor import PrefillChunk
from edgellm_worker.engine.runtime.tensorrt_executor import TensorRtExecutor, TensorRtOptions
from edgellm_worker.engine.runtime.tensorrt_kernels import Mode
from edgellm_worker.engine.runtime.tensorrt_program import Program

SHAPES = ((4, 6, 300), (1, 1, 300), (4, 6, 1900), (4, 4, 300), (8, 4, 300))


def verify_program(executor: TensorRtExecutor, rows: int, width: int, position: int) -> Program:
    machine, rounds, block = executor.machine, executor.rounds, executor.rounds.block
    block.fill(round_input(rows, position, 1, block.width), width - 1, range(rows), [0] * block.num_slots)
    block.upload()
    logits = np.random.default_rng(5).standard_normal((rows * width, machine.model.config.vocab_size)) * 3
    results = rounds.results.bindings(rows, width)
    machine.cuda.upload(logits.astype(np.float16), results["logits"].pointer)
    return rounds.lane.program(machine.recorder.verify(rows, width), results, rows, Mode.STEP)


def prefill_program(executor: TensorRtExecutor, size: int) -> Program:
    """For the stream of rounds, so that it is timed there."""
    prompts, recorder = executor.prompts, executor.machine.recorder
    prompts.block.fill(0, PrefillChunk(np.zeros(size, np.int32), 128, 0))
    prompts.block.upload()
    return prompts.lane.program(recorder.prefill(size), prompts.results.bindings, 1, Mode.PREFILL)


def all_of(launches: list[Callable[[], None]]) -> Callable[[], None]:
    def enqueue() -> None:
        for launch in launches:
            launch()

    return enqueue


def by_kind(executor: TensorRtExecutor, program: Program) -> Iterator[tuple[str, int, float]]:
    """(kind, launches, milliseconds), the step itself first."""
    kinds: dict[str, list[Callable[[], None]]] = {}
    for label, launch in program.launches:
        kinds.setdefault(label, []).append(launch)
    yield "all", len(program.launches), graph_ms(executor, program.enqueue)
    nothing = executor.machine.parts.kernels.token_kernel("nothing", "")
    idle = [lambda: executor._cuda.run(nothing, (1, 1, 1), 32, ())] * len(program.launches)
    yield "empty", len(idle), graph_ms(executor, all_of(idle))
    for label, launches in kinds.items():
        if label.startswith("network") and os.environ.get("KERNELS"):
            continue
        yield label, len(launches), graph_ms(executor, all_of(launches))
    products = [launch for label, launch in program.launches if is_product(label)]
    yield "products", len(products), graph_ms(executor, all_of(products))
    others = [launch for label, launch in program.launches if not is_product(label)]
    yield "the rest", len(others), graph_ms(executor, all_of(others))


def is_product(label: str) -> bool:
    return label.startswith(("network", "product"))


def once(executor: TensorRtExecutor, program: Program) -> None:
    """One step between the marks that a profiler waits for."""
    program.enqueue()
    executor._cuda.synchronize()
    executor._cuda._call("cuProfilerStart")
    program.enqueue()
    executor._cuda.synchronize()
    executor._cuda._call("cuProfilerStop")


def open_executor(name: str, model: Model, whole: EngineSpec) -> TensorRtExecutor:
    if os.environ.get("KERNELS"):
        options = TensorRtOptions(128, lowering=whole.lowering)
        return TensorRtExecutor(model, whole.layout, Cuda(), NoNetworks(), whole.reader(), options)
    networks = Networks(model, LEVEL, TINY if name == "tiny" else None)
    executor = networks.executor(whole, TensorRtOptions(128))
    say(f"{name}: {len(networks.plans)} networks in {networks.build_s:.0f} s")
    return executor


def profile(name: str, model: Model, slots: int, verify: int, capacity: int) -> list[dict[str, object]]:
    executor = open_executor(name, model, spec(slots, verify, LEVEL, capacity, 128))
    found: list[dict[str, object]] = []
    for rows, width, position in SHAPES:
        if rows > slots or width > verify or position + width > capacity:
            continue
        program = verify_program(executor, rows, width, position)
        if os.environ.get("ONCE"):
            once(executor, program)
            break
        for kind, count, ms in by_kind(executor, program):
            say(f"{name} {rows}x{width} at {position}: {kind:24s} {count:4d} launches {1e3 * ms:9.1f} us")
            found.append({"shape": [rows, width, position], "kind": kind, "launches": count, "us": 1e3 * ms})
        if os.environ.get("ONE"):
            break
    for kind, count, ms in by_kind(executor, prefill_program(executor, 128)):
        say(f"{name} prompt piece of 128: {kind:24s} {count:4d} launches {1e3 * ms:9.1f} us")
        found.append({"prefill": 128, "kind": kind, "launches": count, "us": 1e3 * ms})
    executor.close()
    return found


def main(names: list[str]) -> int:
    found: dict[str, object] = {}
    if "dense" in names or not names:
        model = dense_model()
        found["dense"] = profile("dense", model, 8, 6, 2048)
        if not os.environ.get("ONCE") and not os.environ.get("KERNELS"):
            chains = [chain_ms(model, 24) for _ in range(3)]
            say(f"dense: bare chain of 24 rows {statistics.median(chains):.3f} ms of {chains}")
            found["chain_ms"] = chains
    if "tiny" in names or not names:
        found["tiny"] = profile("tiny", tiny_model(), 4, 4, 1536)
    save("profile.json", found)
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
