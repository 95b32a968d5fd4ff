"""A lane: what passes that run one after another share, and passes of another lane, which may run meanwhile, do not.

stream      whatever is prepared and launched inside `on()` belongs to it, with scratch of its own in kernels and
networks
arena       one place for the values of all its passes
control     the block of integers that steers them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.graph import Graph, Lowering
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.cuda import Graph as CudaGraph
from edgellm_worker.engine.runtime.tensorrt_block import Integers
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import lay_out
from edgellm_worker.engine.runtime.tensorrt_program import Bindings, Parts, Program


@dataclass(frozen=True, slots=True)
class Machine:
    """What both lanes have in common: the model and its recordings, kernels and networks, the slots' state."""

    model: Model
    recorder: Recorder
    parts: Parts
    state: Mapping[str, Binding]
    lowering: Lowering
    use_graphs: bool

    @property
    def cuda(self) -> Cuda:
        return self.parts.cuda


class Lane:
    def __init__(self, machine: Machine, stream: Any, block: Integers) -> None:
        self._machine = machine
        self._stream = stream
        self._block = block
        self._arena = self._arena_bytes = 0

    def reserve(self, graphs: Iterable[Graph], results: Mapping[str, Binding]) -> None:
        """Room for the values of the largest of `graphs`; smaller batches and fewer drafts need less of the same."""
        bound = frozenset({*self._machine.state, *self._block.bindings, *results})
        self._arena_bytes = max(lay_out(graph, bound, self._machine.lowering).num_bytes for graph in graphs)
        self._arena = self._machine.cuda.allocate(self._arena_bytes)

    def on(self) -> AbstractContextManager[None]:
        return self._machine.cuda.on(self._stream)

    def program(self, graph: Graph, values: Mapping[str, Binding], batch: int, mode: Mode) -> Program:
        """`values`: results of passes, and what differs from the block. Raises `EngineError` where the arena is too
        small.
        """
        bound = {**self._machine.state, **self._block.bindings, **values}
        layout = lay_out(graph, frozenset(bound), self._machine.lowering)
        if layout.num_bytes > self._arena_bytes:
            raise EngineError(f"a pass of {batch} rows needs {layout.num_bytes} bytes where {self._arena_bytes} are")
        control = Control(self._block.pointer("slots"), self._block.pointer("parity"), batch)
        return Program(graph, layout, self._machine.parts, Bindings(bound, self._arena, control, mode))

    def token_kernel(self, name: str, signature: str, num_blocks: int) -> Callable[..., None]:
        cuda = self._machine.cuda
        kernel = self._machine.parts.kernels.token_kernel(name, signature)
        return lambda *arguments: cuda.run(kernel, (num_blocks, 1, 1), 256, arguments)

    def recorded(self, enqueue: Callable[[], None]) -> RecordedPass:
        return RecordedPass(enqueue, self._machine.cuda, use_graph=self._machine.use_graphs)


class RecordedPass:
    """The first run goes kernel by kernel (libraries set themselves up then), later ones are one graph."""

    def __init__(self, enqueue: Callable[[], None], cuda: Cuda, *, use_graph: bool) -> None:
        self._enqueue = enqueue
        self._cuda = cuda
        self._use_graph = use_graph
        self._has_run = False
        self._graph: CudaGraph | None = None

    def run(self) -> None:
        if self._graph is not None:
            self._graph.launch()
            return
        if self._has_run and self._use_graph:
            self._graph = self._cuda.capture(self._enqueue)
            self._graph.launch()
            return
        self._enqueue()
        self._has_run = True
