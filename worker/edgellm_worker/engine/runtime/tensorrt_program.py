"""A recorded graph made runnable: buffers assigned, plans given contexts, kernels prepared.

`enqueue` puts the whole pass on the stream, in order; under capture that becomes one CUDA graph. A program is bound to
one shape (B, N) and to fixed addresses; everything that changes from step to step lies in device memory.

Memory. State values (caches, recurrent state) and what the caller binds are given; the rest lives in one arena shared
by all programs, which run one after another. A value's place is reused once its last reader has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from edgellm_worker.engine.build.segments import KernelCall, Segment, Step, cut, live_nodes
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.ops.graph import Dtype, Graph, Lowering, Node, Op, Value
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Launch, Mode, Place
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from edgellm_worker.engine.trt import Library

_ALIGNMENT = 256

# Which input an op's output *is*: (output index, input index). The op writes into it.
_IN_PLACE: dict[Op, tuple[tuple[int, int], ...]] = {
    Op.ATTEND: ((1, 3), (2, 4)),
    Op.CONV_COMMIT: ((0, 0),),
    Op.GATED_DELTA_RULE: ((1, 5),),
    Op.DELTA_FOLD: ((0, 0),),
}


# Heads side by side are heads apart: only outside of networks, where nothing need be copied.
_VIEWS: dict[Op, tuple[tuple[int, int], ...]] = {Op.SPLIT_HEADS: ((0, 0),), Op.MERGE_HEADS: ((0, 0),)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Steps, where each value lies in the arena, and the values that are another one (in place, or a view of it)."""

    steps: tuple[Step, ...]
    offsets: Mapping[Value, int]
    num_bytes: int
    roots: Mapping[Value, Value]
    fused: frozenset[Node]


def in_place_roots(graph: Graph, lowering: Lowering) -> dict[Value, Value]:
    """Outputs that are their input, written in place -> the value they ultimately are."""
    table = _IN_PLACE if lowering is Lowering.ROWS else {**_IN_PLACE, **_VIEWS}
    roots: dict[Value, Value] = {}
    for node in graph.nodes:
        for output, source in table.get(node.op, ()):
            origin = node.inputs[source]
            roots[node.outputs[output]] = roots.get(origin, origin)
    return roots


def fused_sums(graph: Graph, lowering: Lowering) -> frozenset[Node]:
    """Sums of a float32 and a float16 value that a norm directly follows: its kernel computes them as well."""
    if lowering is Lowering.ROWS:
        return frozenset()
    return frozenset(
        one
        for one, other in pairwise(live_nodes(graph))
        if one.op is Op.ADD
        and other.op is Op.RMS_NORM
        and other.inputs[0] is one.outputs[0]
        and one.inputs[1].dtype is Dtype.FLOAT16
    )


def lay_out(graph: Graph, bound: frozenset[str], lowering: Lowering = Lowering.ROWS) -> Layout:
    """Place every value that is neither in place nor bound by name; a place is free again after its last reader."""
    steps = cut(graph, lowering)
    roots = in_place_roots(graph, lowering)
    given = {graph.outputs[name] for name in bound if name in graph.outputs}
    last_use: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in _inputs(step):
            last_use[roots.get(value, value)] = index
    last_use.update((roots.get(value, value), len(steps)) for value in graph.outputs.values())
    places = _Places()
    offsets: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in _outputs(step):
            if value not in roots and value not in given:
                offsets[value] = places.take(_num_bytes(value), last_use.get(value, index))
        places.release(index)
    return Layout(steps, offsets, places.num_bytes, roots, fused_sums(graph, lowering))


def _inputs(step: Step) -> Sequence[Value]:
    """A convolution fused with a commit, and a norm fused with a sum, read what those would have read."""
    if isinstance(step, Segment):
        return step.inputs
    values = list(step.node.inputs)
    for value in step.node.inputs:
        if value.producer is not None and value.producer.op in (Op.CONV_COMMIT, Op.ADD):
            values.extend(value.producer.inputs)
    return values


def _outputs(step: Step) -> Sequence[Value]:
    return step.outputs if isinstance(step, Segment) else step.node.outputs


def _num_bytes(value: Value) -> int:
    size = int(np.prod(value.shape)) * value.dtype.num_bytes
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Places:
    """First fit in a growing arena: [begin, end) intervals in use, each with the step after which it is free."""

    def __init__(self) -> None:
        self._used: list[tuple[int, int, int]] = []
        self.num_bytes = 0

    def take(self, size: int, until: int) -> int:
        begin = 0
        for other_begin, other_end, _ in self._used:
            if begin + size <= other_begin:
                break
            begin = max(begin, other_end)
        self._used.append((begin, begin + size, until))
        self._used.sort()
        self.num_bytes = max(self.num_bytes, begin + size)
        return begin

    def release(self, step: int) -> None:
        self._used = [interval for interval in self._used if interval[2] > step]


@dataclass(frozen=True, slots=True)
class Parts:
    """What all programs of one executor share."""

    cuda: Cuda
    weights: WeightStore
    kernels: Kernels
    engines: Engines


@dataclass(frozen=True, slots=True)
class Bindings:
    """Where named graph inputs and outputs live, where the arena begins, and the arrays that kernels index rows by."""

    values: Mapping[str, Binding]
    arena: int
    control: Control
    mode: Mode


class Program:
    def __init__(self, graph: Graph, layout: Layout, parts: Parts, bindings: Bindings) -> None:
        self._bindings = bindings
        self._layout = layout
        self._roots = layout.roots
        self._named = {value: name for name, value in (*graph.inputs.items(), *graph.outputs.items())}
        place = Place(self.binding, bindings.mode, bindings.control, layout.fused)
        launches: list[Launch] = []
        for step in layout.steps:
            match step:
                case Segment():
                    launches.append(self._segment(step, parts))
                case KernelCall(node):
                    launch = parts.kernels.prepare(node, place)
                    if launch is not None:
                        launches.append(launch)
        self._launches = tuple(launches)

    @property
    def num_launches(self) -> int:
        return len(self._launches)

    def enqueue(self) -> None:
        for launch in self._launches:
            launch()

    def binding(self, value: Value) -> Binding:
        value = self._roots.get(value, value)
        if value in self._layout.offsets:
            return Binding(self._bindings.arena + self._layout.offsets[value])
        name = self._named.get(value)
        if name is None or name not in self._bindings.values:
            raise EngineError(f"nothing is bound to {name or value.producer}")
        return self._bindings.values[name]

    def _segment(self, segment: Segment, parts: Parts) -> Launch:
        addresses: dict[str, int] = {}
        for prefix, values in (("x", segment.inputs), ("y", segment.outputs)):
            for index, value in enumerate(values):
                addresses[f"{prefix}{index}"] = self.binding(value).pointer
        for index, group in enumerate(segment.weight_groups):
            for suffix, pointer in parts.weights.inputs(group).items():
                addresses[f"w{index}{suffix}"] = pointer
        shapes = {f"x{index}": (value.num_rows, *value.row_shape) for index, value in enumerate(segment.inputs)}
        return parts.engines.prepare(segment.key, segment.num_rows, shapes, addresses)


class Engines:
    """Deserialised plans by segment key, and one execution context per (plan, number of rows).

    All contexts share one scratch memory, since they run one after another. A context is made for one shape and keeps
    it: changing shapes under capture is not allowed.
    """

    def __init__(self, library: Library, cuda: Cuda, logger: Any) -> None:
        self._library = library
        self._cuda = cuda
        self._logger = logger  # the library keeps a bare pointer to it
        self._runtime = library.module.Runtime(logger)
        self._engines: dict[str, Any] = {}
        self._contexts: dict[tuple[str, int], Any] = {}
        self._scratch = 0

    def load(self, plans: Mapping[str, bytes]) -> None:
        """Raises `EngineError` naming a plan that this library cannot read."""
        for key, plan in plans.items():
            engine = self._runtime.deserialize_cuda_engine(plan)
            if engine is None:
                raise EngineError(f"plan {key} cannot be read by {self._library.name} on this GPU")
            self._engines[key] = engine
        sizes = [self._scratch_bytes(engine) for engine in self._engines.values()]
        self._scratch = self._cuda.allocate(max(sizes, default=0))

    def __contains__(self, key: str) -> bool:
        return key in self._engines

    def close(self) -> None:
        """Contexts before engines before the runtime."""
        self._contexts.clear()
        self._engines.clear()
        self._runtime = None

    def prepare(
        self, key: str, num_rows: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]
    ) -> Launch:
        context = self._context(key, num_rows, shapes)
        stream = int(self._cuda.stream)
        pairs = tuple(addresses.items())

        def launch() -> None:
            for name, address in pairs:
                context.set_tensor_address(name, address)
            if not context.execute_async_v3(stream):
                raise EngineError(f"network {key} failed to run")

        return launch

    def _context(self, key: str, num_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        if (key, num_rows) not in self._contexts:
            engine = self._engines[key]
            context = self._make_context(engine)
            profile = self._profile(engine, num_rows)
            if not context.set_optimization_profile_async(profile, int(self._cuda.stream)):
                raise EngineError(f"network {key}: profile {profile} cannot be selected")
            for name, shape in shapes.items():
                if not context.set_input_shape(name, shape):
                    raise EngineError(f"network {key} was not built for {num_rows} rows")
            self._cuda.synchronize()
            self._contexts[key, num_rows] = context
        return self._contexts[key, num_rows]

    def _make_context(self, engine: Any) -> Any:
        if hasattr(engine, "create_execution_context_without_device_memory"):
            context = engine.create_execution_context_without_device_memory()
        else:
            kinds = self._library.module.ExecutionContextAllocationStrategy
            context = engine.create_execution_context(kinds.USER_MANAGED)
        if context is None:
            raise EngineError("no execution context can be made: the GPU may be out of memory")
        context.device_memory = self._scratch
        return context

    def _profile(self, engine: Any, num_rows: int) -> int:
        """The narrowest profile that takes `num_rows`."""
        fitting: list[tuple[int, int]] = []
        for profile in range(engine.num_optimization_profiles):
            least, _, most = (shape[0] for shape in self._profile_shape(engine, profile))
            if least <= num_rows <= most:
                fitting.append((most, profile))
        if not fitting:
            raise EngineError(f"no optimization profile takes {num_rows} rows")
        return min(fitting)[1]

    def _profile_shape(self, engine: Any, profile: int) -> Any:
        name = "x0"
        if hasattr(engine, "get_tensor_profile_shape"):
            return engine.get_tensor_profile_shape(name, profile)
        return engine.get_profile_shape(profile, name)

    def _scratch_bytes(self, engine: Any) -> int:
        size = getattr(engine, "device_memory_size_v2", None)
        return int(engine.device_memory_size if size is None else size)


Enqueue = Callable[[], None]
