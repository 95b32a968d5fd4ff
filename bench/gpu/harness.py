"""One GPU, one library, and the means to run a recorded graph on it and look at every result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from edgellm_worker.engine.build.builder import Builder, BuildSettings, RowRange, collecting_logger
from edgellm_worker.engine.build.segments import Segment, cut
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.ops.graph import Dtype, Graph, Lowering
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import lay_out
from edgellm_worker.engine.runtime.tensorrt_program import Bindings, Engines, Parts, Program
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from edgellm_worker.engine.trt import load_library

NUMPY = {Dtype.FLOAT32: np.float32, Dtype.FLOAT16: np.float16, Dtype.INT32: np.int32, Dtype.FP8: np.uint8}
OUT = Path(os.environ.get("OUT", "."))
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "worker/edgellm_worker/data/tiny-qwen3.5-mtp"


def plans_folder(level: int | None) -> Path | None:
    """Where plans are kept between runs on one machine, if $PLANS says so. They hold no weights."""
    if "PLANS" not in os.environ:
        return None
    folder = Path(os.environ["PLANS"]) / f"level{level}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def say(*words: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, flush=True)


def save(name: str, result: object) -> None:
    (OUT / name).write_text(json.dumps(result, indent=1))


class NoNetworks:
    """Stands for the engines where only kernels are looked at: launches nothing."""

    def prepare(self, *_arguments: object) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None:
        pass


class Device:
    """Networks are compiled on first use at a low optimization level and kept by their structural key. With $KERNELS
    there are none, and no TensorRT is needed: kernels alone can be run.
    """

    def __init__(self, level: int = 1, lowering: Lowering | None = None) -> None:
        self.library = None if os.environ.get("KERNELS") else load_library()
        self.level = level
        self.cuda = Cuda()
        if self.library is not None:
            self.logger = collecting_logger(self.library)
            self.builder = Builder(self.library, BuildSettings(optimization_level=level))
        self.weights = WeightStore(self.cuda)
        self.kernels = Kernels(self.cuda, self.weights)
        self.lowering = lowering or (self.library.lowering if self.library else Lowering.PRODUCTS)
        self.build_s = 0.0

    def describe(self) -> dict[str, str]:
        return {
            "library": self.library.name if self.library else "none",
            "gpu": self.cuda.name,
            "architecture": self.cuda.architecture,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
        }

    def parts(self, graph: Graph, ranges: tuple[RowRange, ...] | None = None) -> Parts:
        if self.library is None:
            return Parts(self.cuda, self.weights, self.kernels, NoNetworks())
        engines = Engines(self.library, self.cuda, self.logger)
        plans: dict[str, bytes] = {}
        for step in cut(graph, self.lowering):
            if isinstance(step, Segment) and step.key not in plans:
                rows = ranges or (RowRange(1, max(1, step.num_rows), max(1, step.num_rows)),)
                began = time.perf_counter()
                plans[step.key] = self._plan(step, rows)
                self.build_s += time.perf_counter() - began
        engines.load(plans)
        return Parts(self.cuda, self.weights, self.kernels, engines)

    def _plan(self, segment: Segment, ranges: tuple[RowRange, ...]) -> bytes:
        folder = plans_folder(self.level)
        if folder is None:
            return self.builder.compile(segment, ranges)
        sizes = "_".join(f"{r.least}-{r.typical}-{r.most}" for r in ranges)
        kept = folder / f"{segment.key}_{sizes}.plan"
        if not kept.exists():
            kept.write_bytes(self.builder.compile(segment, ranges))
        return kept.read_bytes()

    def upload(self, array: Array) -> int:
        return self.cuda.upload(array)

    def program(
        self, graph: Graph, feeds: Mapping[str, Array], mode: Mode, parts: Parts | None = None
    ) -> tuple[Program, dict[str, Binding]]:
        """`feeds` are the graph's inputs by name, and "slots" and "parity" where kernels need them."""
        batch = next(iter(graph.inputs.values())).shape[0]
        slots = feeds.get("slots", np.arange(batch, dtype=np.int32))
        parity = feeds.get("parity", np.zeros(64, np.int32))
        bound = {name: Binding(self.upload(feeds[name])) for name in graph.inputs}
        for name, value in graph.outputs.items():
            size = int(np.prod(value.shape)) * value.dtype.num_bytes
            pointer = self.cuda.allocate(size)
            self.cuda.fill_zero(pointer, size)
            bound[name] = Binding(pointer)
        layout = lay_out(graph, frozenset(bound), self.lowering)
        control = Control(self.upload(slots), self.upload(parity), batch)
        bindings = Bindings(bound, self.cuda.allocate(layout.num_bytes), control, mode)
        return Program(graph, layout, parts or self.parts(graph), bindings), bound

    def run(self, graph: Graph, feeds: Mapping[str, Array], mode: Mode = Mode.STEP) -> dict[str, Array]:
        """-> outputs, and inputs as they are afterwards (state is written in place) under "name'"."""
        program, bound = self.program(graph, feeds, mode)
        program.enqueue()
        found: dict[str, Array] = {}
        for name, value in graph.outputs.items():
            found[name] = self.cuda.download(bound[name].pointer, value.shape, NUMPY[value.dtype])
        for name, value in graph.inputs.items():
            found[name + "'"] = self.cuda.download(bound[name].pointer, value.shape, NUMPY[value.dtype])
        return found

    def time_ms(self, enqueue: Callable[[], None], repeats: int = 50) -> float:
        """Median device time of one replay of what `enqueue` records."""
        enqueue()
        self.cuda.synchronize()
        graph = self.cuda.capture(enqueue)
        times: list[float] = []
        for index in range(repeats + 5):
            with self.cuda.timer() as elapsed:
                graph.launch()
            if index >= 5:
                times.append(elapsed())
            else:
                elapsed()
        return float(np.median(times))


def relative_error(out: Array, expected: Array) -> float:
    difference = np.linalg.norm(out.astype(np.float64) - expected.astype(np.float64))
    size = float(np.linalg.norm(expected.astype(np.float64)))
    return float("nan") if np.isnan(difference) else float(difference / (size or 1.0))
