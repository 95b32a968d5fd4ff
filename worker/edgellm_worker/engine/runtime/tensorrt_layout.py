"""What a recorded graph's values are in memory: places in one arena, values written in place, views, and nodes whose
work another node's kernel does.

State values (caches, recurrent state) and what the caller binds are given; the rest lives in one arena shared by all
programs, which run one after another. A value's place is reused once its last reader has run.

Where networks hold matrix products alone (`Lowering.PRODUCTS`) kernels read values where a joint product left them: the
parts of one product, heads, and slices of heads are views, and nothing is copied to part them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from edgellm_worker.engine.build.segments import Segment, Step, cut, live_nodes
from edgellm_worker.engine.checkpoint.weights import DenseWeight
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Dtype, Graph, Lowering, Node, Op, Value

_ALIGNMENT = 256

# Which input an op's output *is*: (output index, input index). The op writes into it.
_IN_PLACE: dict[Op, tuple[tuple[int, int], ...]] = {
    Op.ATTEND: ((1, 3), (2, 4)),
    Op.CONV_COMMIT: ((0, 0),),
    Op.GATED_DELTA_RULE: ((1, 5),),
    Op.DELTA_FOLD: ((0, 0),),
}

STEP_TOKENS = 16
"""The most new tokens a row of the attention kernel for steps takes; longer passes are prompt pieces."""
_STEP_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class View:
    """A value inside another's memory. Element i of token t lies at offset + t * pitch + i // width * step + i % width,
    in elements: `width` is a head's size where a token has heads, and they lie `step` apart.
    """

    root: Value
    offset: int
    pitch: int
    step: int
    width: int

    @classmethod
    def whole(cls, value: Value) -> View:
        """The value itself, densely."""
        width = value.shape[-1]
        return cls(value, 0, int(np.prod(value.shape[2:])), width, width)


@dataclass(frozen=True, slots=True)
class Layout:
    """Steps, where each value lies in the arena, and the values that are another one: in place or the same memory read
    alike (`roots`), or parts of it (`views`). `fused` nodes launch nothing: the kernel that reads them does their work.
    `activations` are done by the product before them, which does not store what it made: by that product's output.
    """

    steps: tuple[Step, ...]
    offsets: Mapping[Value, int]
    num_bytes: int
    roots: Mapping[Value, Value]
    views: Mapping[Value, View]
    fused: frozenset[Node]
    activations: Mapping[Value, Node]
    has_products: bool  # networks hold matrix products alone

    def view(self, value: Value) -> View:
        return self.views.get(value) or View.whole(value)


def lay_out(graph: Graph, bound: frozenset[str], lowering: Lowering = Lowering.ROWS) -> Layout:
    """Place every value that is neither in place nor bound by name; a place is free again after its last reader."""
    steps = cut(graph, lowering)
    given = {graph.outputs[name] for name in bound if name in graph.outputs}
    views = _views(graph, steps, given) if lowering is Lowering.PRODUCTS else {}
    activations = _activations(graph, steps, views)
    done = set(activations.values())
    steps = tuple(step for step in steps if isinstance(step, Segment) or step.node not in done)
    roots = {**_in_place_roots(graph), **{value: view.root for value, view in views.items() if view.root is not value}}
    fused = _fused(graph, given, lowering)
    last_use: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in reads(step, fused):
            last_use[roots.get(value, value)] = index
    last_use.update((roots.get(value, value), len(steps)) for value in graph.outputs.values())
    places = _Places()
    offsets: dict[Value, int] = {}
    for index, step in enumerate(steps):
        for value in _outputs(step, activations):
            if value not in roots and value not in given:
                size = _num_bytes(value, views.get(value))
                offsets[value] = places.take(size, last_use.get(value, index))
        places.release(index)
    return Layout(steps, offsets, places.num_bytes, roots, views, fused, activations, lowering is Lowering.PRODUCTS)


def _in_place_roots(graph: Graph) -> dict[Value, Value]:
    """Outputs that are their input, written in place -> the value they ultimately are."""
    roots: dict[Value, Value] = {}
    for node in graph.nodes:
        for output, source in _IN_PLACE.get(node.op, ()):
            origin = node.inputs[source]
            roots[node.outputs[output]] = roots.get(origin, origin)
    return roots


def reads(step: Step, fused: frozenset[Node]) -> Iterator[Value]:
    """What a step reads, with what the nodes read whose work it does: fused ones, and a convolution's commit. A sum is
    the work of the norm right behind it, which stores it: others read it there, and not what it was made of.
    """
    if isinstance(step, Segment):
        yield from step.inputs
        return
    waiting = list(step.node.inputs)
    while waiting:
        value = waiting.pop()
        yield value
        producer = value.producer
        if producer is None or (producer.op is Op.ADD and value is not step.node.inputs[0]):
            continue
        if producer in fused or producer.op is Op.CONV_COMMIT:
            waiting.extend(producer.inputs)


def _outputs(step: Step, activations: Mapping[Value, Node]) -> Sequence[Value]:
    if not isinstance(step, Segment):
        return step.node.outputs
    return activations[step.outputs[0]].outputs if step.outputs[0] in activations else step.outputs


def _num_bytes(value: Value, view: View | None) -> int:
    """A joint product's first part stands for all of it."""
    size = value.num_rows * view.pitch if view is not None else int(np.prod(value.shape))
    return -(-size * value.dtype.num_bytes // _ALIGNMENT) * _ALIGNMENT


# --- views ---


def _views(graph: Graph, steps: Sequence[Step], given: set[Value]) -> dict[Value, View]:
    """Values that are parts of a joint product, heads, or slices; one that the caller bound is copied instead."""
    views: dict[Value, View] = {}
    for step in steps:
        for node in step.joined if isinstance(step, Segment) else ():
            views.update(_parts(node.outputs, View.whole(node.outputs[0])))
    for node in live_nodes(graph):
        if node.op not in (Op.SPLIT, Op.SPLIT_HEADS, Op.MERGE_HEADS) or not given.isdisjoint(node.outputs):
            continue
        source = views.get(node.inputs[0]) or View.whole(node.inputs[0])
        if source.width != node.inputs[0].shape[-1]:
            raise BuildError(f"{node.op}: its input lies in pieces of {source.width}")
        if node.op is Op.SPLIT:
            views.update(_slices(node.outputs, source))
            continue
        (out,) = node.outputs
        if node.op is Op.SPLIT_HEADS:
            head = out.shape[-1]
            views[out] = replace(source, step=head, width=head)
        else:
            whole = out.shape[-1]
            views[out] = replace(source, step=whole, width=whole) if source.step == source.width else source
    return views


def _parts(outputs: Sequence[Value], whole: View) -> dict[Value, View]:
    """The outputs side by side in each row."""
    pitch = sum(out.shape[-1] for out in outputs)
    return _slices(outputs, replace(whole, pitch=pitch))


def _slices(outputs: Sequence[Value], source: View) -> dict[Value, View]:
    found: dict[Value, View] = {}
    offset = source.offset
    for out in outputs:
        size = out.shape[-1]
        step = size if len(out.shape) == 3 else source.step
        found[out] = replace(source, offset=offset, step=step, width=size)
        offset += size
    return found


# --- products of our own, and what they do besides ---

MOST_PRODUCT_ROWS = 48
"""Of the kernel for products of few rows (kernels/linear.cu), which reads a weight once."""


def is_own_product(segment: Segment) -> bool:
    """Whether the kernel for products of few rows takes this network's place: no biases, no quantized weights."""
    if len(segment.nodes) != 1 or len(segment.weight_groups) != 1 or len(segment.outputs) != 1:
        return False
    weights = segment.weight_groups[0].weights
    is_plain = segment.weight_groups[0].is_matrix and all(isinstance(weight, DenseWeight) for weight in weights)
    width, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[-1]
    return is_plain and segment.num_rows <= MOST_PRODUCT_ROWS and not depth % 8 and not width % 2


def _activations(graph: Graph, steps: Sequence[Step], views: Mapping[Value, View]) -> dict[Value, Node]:
    """SwiGLU by the product that makes both its inputs, where nothing else reads them."""
    found: dict[Value, Node] = {}
    products = {step.outputs[0]: step.joined[0] for step in steps if isinstance(step, Segment) and step.joined}
    own = {step.outputs[0] for step in steps if isinstance(step, Segment) and is_own_product(step)}
    readers = Counter(value for node in live_nodes(graph) for value in node.inputs)
    for node in live_nodes(graph):
        if node.op is not Op.SWIGLU or node.inputs[0] not in views:
            continue
        root = views[node.inputs[0]].root
        is_alone = all(readers[value] == 1 for value in node.inputs) and node.outputs[0] not in views
        if root in own and is_alone and tuple(products.get(root, node).outputs) == node.inputs:
            found[root] = node
    return found


# --- fused nodes ---


def _fused(graph: Graph, given: set[Value], lowering: Lowering) -> frozenset[Node]:
    """Nodes whose work another node's kernel does:

    - a log-sum-exp that the caller bound, by the top-k of the same scores

    and where they are no part of a network

    - a sum of a float32 and a float16 value, by the norm right after it (which also stores the sum)
    - norm and rotation of queries and keys, by the attention of a step
    """
    nodes = live_nodes(graph)
    scores = {node.inputs[0] for node in nodes if node.op is Op.TOP_K}
    sums = {node for node in nodes if node.op is Op.LOG_SUM_EXP and node.inputs[0] in scores}
    found = {node for node in sums if node.outputs[0] in given}
    if lowering is Lowering.ROWS:
        return frozenset(found)
    found.update(one for one, other in pairwise(nodes) if _is_sum_before_norm(one, other))
    readers: dict[Value, int] = {}
    for node in nodes:
        for value in node.inputs:
            readers[value] = readers.get(value, 0) + 1
    private = {value for value, count in readers.items() if count == 1} - set(graph.outputs.values())
    for node in nodes:
        if node.op is Op.ATTEND and is_step(node):
            found.update(_head_chain(node, private))
    return frozenset(found)


def _is_sum_before_norm(one: Node, other: Node) -> bool:
    is_norm_of_sum = one.op is Op.ADD and other.op is Op.RMS_NORM and other.inputs[0] is one.outputs[0]
    return is_norm_of_sum and one.inputs[1].dtype is Dtype.FLOAT16


def is_step(attend: Node) -> bool:
    _, tokens, _, dim = attend.inputs[0].shape
    return tokens <= STEP_TOKENS and dim in _STEP_HEAD_DIMS


@dataclass(frozen=True, slots=True)
class HeadChain:
    """Where a step's attention finds queries or keys: `source`, still to be normed and rotated by these nodes."""

    source: Value
    norm: Node | None
    rotary: Node | None

    @classmethod
    def of(cls, value: Value, belongs: frozenset[Node]) -> HeadChain:
        """Back from `value` through a rotation and a norm, as far as they are among `belongs`."""
        rotary = value.producer if value.producer in belongs and value.producer.op is Op.ROTARY else None
        value = rotary.inputs[0] if rotary is not None else value
        norm = value.producer if value.producer in belongs and value.producer.op is Op.RMS_NORM else None
        return cls(norm.inputs[0] if norm is not None else value, norm, rotary)

    @property
    def nodes(self) -> set[Node]:
        return {node for node in (self.norm, self.rotary) if node is not None}

    def is_like(self, other: HeadChain) -> bool:
        """Whether one kernel can do both: the same angles and the same kind of norm."""
        return _settings(self.norm) == _settings(other.norm) and _angles(self.rotary) == _angles(other.rotary)


def _settings(norm: Node | None) -> object:
    return None if norm is None else norm.attrs


def _angles(rotary: Node | None) -> object:
    return None if rotary is None else rotary.inputs[1:]


def _head_chain(attend: Node, private: set[Value]) -> set[Node]:
    """The norms and rotations before this attention that read nothing but heads and feed nothing but it."""
    belongs = frozenset(value.producer for value in private if value.producer is not None)
    query, key = (HeadChain.of(value, belongs) for value in attend.inputs[:2])
    return query.nodes | key.nodes if query.is_like(key) else set()


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
