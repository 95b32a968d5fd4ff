"""Cut a recorded model into TensorRT networks and kernel calls.

Row operations between two kernel calls form a *segment*; a segment is one TensorRT network over [M, ...]. Attention,
convolution and the delta rule stand between segments as fused kernels of our own, because no TensorRT release runs them
well at a handful of tokens per row, and the releases without plugins cannot take them in at all:

    [norm, projections, rotary] attend [gate, o_proj, add, norm, mlp, add, norm, projections] causal_conv [...] ...

Segments of equal structure share one plan whatever their weights are, since weights are inputs. `key` is the hash of
that structure: two layers of one kind in one model, or the same layer in another graph, have equal keys.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from edgellm_worker.engine.checkpoint.weights import Fp8Weight, Nvfp4Weight, Weight
from edgellm_worker.engine.ops.graph import STATE_OPS, Graph, Lowering, Node, Op, Value


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One network input for weights: several are stacked along their first dimension. `is_matrix`: a product's."""

    weights: tuple[Weight, ...]
    is_matrix: bool


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """`weight_groups[i]` is the network input `w{i}`; inputs are `x{i}`, outputs `y{i}`. A `joined` node gives all
    of its product as its first output: what reads its parts finds them there.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weight_groups: tuple[WeightGroup, ...]
    key: str
    joined: tuple[Node, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.outputs[0].num_rows


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    node: Node


Step = Segment | KernelCall


def node_weight_groups(node: Node) -> tuple[WeightGroup, ...]:
    """How a row op's weights become network inputs, in the order its lowering names them."""
    if node.op is Op.LINEAR:
        return tuple(WeightGroup((weight,), index == 0) for index, weight in enumerate(node.weights))
    if node.op is Op.FUSED_LINEAR:
        count = len(node.outputs)
        groups = [WeightGroup(node.weights[:count], is_matrix=True)]
        if len(node.weights) > count:
            groups.append(WeightGroup(node.weights[count:], is_matrix=False))
        return tuple(groups)
    return tuple(WeightGroup((weight,), is_matrix=False) for weight in node.weights)


def cut(graph: Graph, lowering: Lowering = Lowering.ROWS) -> tuple[Step, ...]:
    """The steps of `graph` in execution order. A kernel call that needs nothing of the open segment goes before it."""
    nodes, kernel_ops = live_nodes(graph), lowering.kernel_ops
    consumers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.inputs:
            consumers.setdefault(value, []).append(node)
    wanted = set(graph.outputs.values())
    steps: list[Step] = []
    opened: list[Node] = []

    def close() -> None:
        if opened:
            steps.append(_segment(tuple(opened), consumers, wanted, joins=lowering is Lowering.PRODUCTS))
            opened.clear()

    for node in nodes:
        if node.op not in kernel_ops:
            opened.append(node)
            continue
        if any(value.producer in opened for value in node.inputs):
            close()
        steps.append(KernelCall(node))
    close()
    return tuple(steps)


def live_nodes(graph: Graph) -> list[Node]:
    """What writes state, or leads to an output or to something that does; the rest computes for nobody."""
    needed = set(graph.outputs.values())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op in STATE_OPS or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _segment(
    nodes: tuple[Node, ...], consumers: dict[Value, list[Node]], wanted: set[Value], *, joins: bool
) -> Segment:
    inside = set(nodes)
    inputs: dict[Value, None] = {}
    outputs: list[Value] = []
    groups: list[WeightGroup] = []
    joined: list[Node] = []
    for node in nodes:
        inputs.update((value, None) for value in node.inputs if value.producer not in inside)
        groups.extend(node_weight_groups(node))
        read = [value for value in node.outputs if any(user not in inside for user in consumers.get(value, ()))]
        if joins and node.op is Op.FUSED_LINEAR and read and not _is_taken_apart(node, consumers, wanted, inside):
            joined.append(node)
            outputs.append(node.outputs[0])
            continue
        outputs.extend(value for value in node.outputs if value in wanted or value in read)
    parts = (nodes, tuple(inputs), tuple(outputs), tuple(joined))
    return Segment(nodes, tuple(inputs), tuple(outputs), tuple(groups), _key(*parts), tuple(joined))


def _is_taken_apart(node: Node, consumers: dict[Value, list[Node]], wanted: set[Value], inside: set[Node]) -> bool:
    """Whether a part of this joint product is wanted by itself, or read within the network."""
    return any(value in wanted or any(user in inside for user in consumers.get(value, ())) for value in node.outputs)


def _key(
    nodes: tuple[Node, ...], inputs: tuple[Value, ...], outputs: tuple[Value, ...], joined: tuple[Node, ...]
) -> str:
    numbers = {value: index for index, value in enumerate(inputs)}
    lines = [f"in {value.row_shape} {value.dtype}" for value in inputs]
    for node in nodes:
        for value in node.outputs:
            numbers[value] = len(numbers)
        used = [numbers[value] for value in node.inputs]
        made = [(numbers[value], value.row_shape, value.dtype.value) for value in node.outputs]
        weights = [_weight_form(weight) for weight in node.weights]
        lines.append(f"{node.op} {used} {node.attrs} {weights} -> {made}{' joined' if node in joined else ''}")
    lines.append(f"out {[numbers[value] for value in outputs]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _weight_form(weight: Weight) -> tuple[object, ...]:
    """What of a weight shapes its network: kind, shape, and scales that must be build-time constants."""
    if isinstance(weight, Nvfp4Weight):
        return ("nvfp4", weight.shape, None if weight.input_scale is None else float(weight.input_scale))
    if isinstance(weight, Fp8Weight):
        return ("fp8", weight.shape, weight.input_scale is not None)
    return ("dense", weight.shape)
