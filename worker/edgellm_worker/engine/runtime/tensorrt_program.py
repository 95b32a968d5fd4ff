"""A recorded graph made runnable: buffers assigned, plans given contexts, kernels prepared.

`enqueue` puts the whole pass on the stream, in order; under capture that becomes one CUDA graph. A program is bound to
one shape (B, N) and to fixed addresses; everything that changes from step to step lies in device memory.

Where values lie is tensorrt_layout's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgellm_worker.engine.build.segments import KernelCall, Segment
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.ops.graph import Graph, Value
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Launch, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import Layout
from edgellm_worker.engine.runtime.tensorrt_place import Place
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore
from edgellm_worker.engine.trt import Library


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
        self._named = {value: name for name, value in (*graph.inputs.items(), *graph.outputs.items())}
        place = Place(self.binding, bindings.mode, bindings.control, layout, graph)
        launches: list[tuple[str, Launch]] = []
        for step in layout.steps:
            match step:
                case Segment():
                    launches.append(self._segment(step, parts, place))
                case KernelCall(node):
                    launch = parts.kernels.prepare(node, place)
                    if launch is not None:
                        launches.append((node.op.value, launch))
        self._labels = tuple(label for label, _ in launches)
        self._launches = tuple(launch for _, launch in launches)

    @property
    def launches(self) -> tuple[tuple[str, Launch], ...]:
        """In order, each with the op it runs, or with the network's key: what a profile takes apart."""
        return tuple(zip(self._labels, self._launches, strict=True))

    def enqueue(self) -> None:
        for launch in self._launches:
            launch()

    def binding(self, value: Value) -> Binding:
        """The memory that holds `value`, from its first element on: where it is a view, that of its root."""
        value = self._layout.roots.get(value, value)
        if value in self._layout.offsets:
            return Binding(self._bindings.arena + self._layout.offsets[value])
        name = self._named.get(value)
        if name is None or name not in self._bindings.values:
            raise EngineError(f"nothing is bound to {name or value.producer}")
        return self._bindings.values[name]

    def _segment(self, segment: Segment, parts: Parts, place: Place) -> tuple[str, Launch]:
        product = parts.kernels.products.prepare(segment, place) if self._layout.has_products else None
        if product is not None:
            return f"product {segment.key[:6]}", product
        return f"network {segment.key[:6]}", self._network(segment, parts, place)

    def _network(self, segment: Segment, parts: Parts, place: Place) -> Launch:
        addresses: dict[str, int] = {}
        for index, value in enumerate(segment.inputs):
            addresses[f"x{index}"] = place.pointer(value)
        for index, value in enumerate(segment.outputs):
            addresses[f"y{index}"] = place.heads(value).pointer
        for index, group in enumerate(segment.weight_groups):
            for suffix, pointer in parts.weights.inputs(group).items():
                addresses[f"w{index}{suffix}"] = pointer
        shapes = {f"x{index}": (value.num_rows, *value.row_shape) for index, value in enumerate(segment.inputs)}
        return parts.engines.prepare(segment.key, segment.num_rows, shapes, addresses)


class Engines:
    """Deserialised plans by segment key, and one execution context per plan, number of rows and stream.

    All contexts of a stream share one scratch memory, since they run one after another. A context is made for one shape
    and keeps it: changing shapes under capture is not allowed.
    """

    def __init__(self, library: Library, cuda: Cuda, logger: Any) -> None:
        self._library = library
        self._cuda = cuda
        self._logger = logger  # the library keeps a bare pointer to it
        self._runtime = library.module.Runtime(logger)
        self._engines: dict[str, Any] = {}
        self._contexts: dict[tuple[str, int, int], Any] = {}
        self._scratch: dict[int, tuple[int, int]] = {}

    def load(self, plans: Mapping[str, bytes]) -> None:
        """Raises `EngineError` naming a plan that this library cannot read."""
        for key, plan in plans.items():
            engine = self._runtime.deserialize_cuda_engine(plan)
            if engine is None:
                raise EngineError(f"plan {key} cannot be read by {self._library.name} on this GPU")
            self._engines[key] = engine

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
        stream = int(self._cuda.stream)
        if (key, num_rows, stream) not in self._contexts:
            engine = self._engines[key]
            context = self._make_context(engine, stream)
            profile = self._profile(engine, num_rows)
            if not context.set_optimization_profile_async(profile, stream):
                raise EngineError(f"network {key}: profile {profile} cannot be selected")
            for name, shape in shapes.items():
                if not context.set_input_shape(name, shape):
                    raise EngineError(f"network {key} was not built for {num_rows} rows")
            self._cuda.synchronize()
            self._contexts[key, num_rows, stream] = context
        return self._contexts[key, num_rows, stream]

    def _make_context(self, engine: Any, stream: int) -> Any:
        if stream not in self._scratch:
            sizes = [self._scratch_bytes(engine) for engine in self._engines.values()]
            self._scratch[stream] = (self._cuda.allocate(max(sizes)), max(sizes))
        if hasattr(engine, "create_execution_context_without_device_memory"):
            context = engine.create_execution_context_without_device_memory()
        else:
            kinds = self._library.module.ExecutionContextAllocationStrategy
            context = engine.create_execution_context(kinds.USER_MANAGED)
        if context is None:
            raise EngineError("no execution context can be made: the GPU may be out of memory")
        scratch, num_bytes = self._scratch[stream]
        if hasattr(context, "set_device_memory"):  # since 10.1, where the setter without a size is deprecated
            context.set_device_memory(scratch, num_bytes)
        else:
            context.device_memory = scratch
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
