"""What a kernel call is told by its program: where values lie, the mode, and the arrays that rows are indexed by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Graph, Node, Value
from edgellm_worker.engine.runtime.tensorrt_layout import Layout, View


class Mode(Enum):
    """STEP keeps this pass's per-token results pending in the state; PREFILL folds them itself at the end."""

    STEP = auto()
    PREFILL = auto()


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a value lives; integer values may lie `stride` elements apart."""

    pointer: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Control:
    """Device arrays shared by all calls of a program: slots int32 [B] and, per slot, which pending half is current."""

    slots: int
    parity: int
    batch: int


@dataclass(frozen=True, slots=True)
class Heads:
    """Vectors of `width` elements, `step` apart within a token; tokens are `pitch` apart. In elements."""

    pointer: int
    pitch: int
    step: int
    width: int


@dataclass(frozen=True, slots=True)
class Place:
    """`binding` gives the memory of a value's root."""

    binding: Callable[[Value], Binding]
    mode: Mode
    control: Control
    layout: Layout
    graph: Graph

    @property
    def fused(self) -> frozenset[Node]:
        return self.layout.fused

    def is_view(self, value: Value) -> bool:
        return value in self.layout.views

    def pointer(self, value: Value) -> int:
        """Of a value that lies densely."""
        view = self.layout.view(value)
        dense = View.whole(value)
        if (view.pitch, view.step, view.width) != (dense.pitch, dense.step, dense.width):
            raise BuildError(f"{_name(value)}: its reader wants it dense, but it is part of a joint product")
        return self._at(value, view)

    def rows(self, value: Value) -> tuple[int, int]:
        """(pointer, elements from token to token) of a value whose tokens are each in one piece."""
        view = self.layout.view(value)
        if view.step != view.width:
            raise BuildError(f"{_name(value)}: its reader wants whole rows, but it lies in pieces of {view.width}")
        return self._at(value, view), view.pitch

    def heads(self, value: Value) -> Heads:
        view = self.layout.view(value)
        return Heads(self._at(value, view), view.pitch, view.step, view.width)

    def _at(self, value: Value, view: View) -> int:
        return self.binding(value).pointer + view.offset * value.dtype.num_bytes


def _name(value: Value) -> str:
    return value.name if value.producer is None else f"an output of {value.producer.op}"
