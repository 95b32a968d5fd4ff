"""A recorded pass as one TensorRT network: row operations, and what looks across tokens as native layers or decomposed.

    attention and its cache    IKVCacheUpdate and IAttention, per-row lengths as a mask; decomposed over an FP8 cache
    gated delta rule           its block form and its fold, as matrix products over ratios
    convolution, gathers, scores    slices, gathers, TopK and reductions

Every shape is static: B rows of N tokens, and row b lives in slot b. Row values are [B * N, ...], as in the networks of
row operations, whose lowerings serve here too; state keeps its shape. State goes in under its name and comes out under
`<name>'`: caches in place, the rest to be bound alternately. So k and log g of pending tokens are not kept twice.

The delta rule is float32 throughout. Exponents c_t - c_i are formed as sums over i < j <= t by a product with zeros and
ones, so that nothing cancels, and are masked before exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from edgellm_worker.engine.build.passes import PENDING_HALVES
from edgellm_worker.engine.build.segments import live_nodes, node_weight_groups
from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Dtype, Graph, Node, Op, Value
from edgellm_worker.engine.ops.tensorrt_layers import Layers
from edgellm_worker.engine.ops.tensorrt_rows import Emitter, emit_row_op

F32: Final = Dtype.FLOAT32
_BLOCK: Final = 8
_CLOSED: Final = -1e30
"""An exponent whose exp is 0."""

WholeLowering = Callable[[Emitter, Node, tuple[str, ...]], tuple[Any, ...]]


def emit_whole(layers: Layers, graph: Graph) -> None:
    """Network inputs are the graph's by name, weights `w{i}`; outputs are the graph's, and the new state."""
    emitter = Emitter(layers)
    nodes = live_nodes(graph)
    used = {value for node in nodes for value in node.inputs} | set(graph.outputs.values())
    for name, value in graph.inputs.items():
        if value in used:
            emitter.tensors[value] = layers.input(name, _input_shape(value), layers.data_type(value.dtype))
    num_weights = 0
    state: dict[Value, Any] = {}
    for node in nodes:
        count = len(node_weight_groups(node))
        names = tuple(f"w{num_weights + index}" for index in range(count))
        num_weights += count
        if node.op in WHOLE_LOWERINGS:
            made = WHOLE_LOWERINGS[node.op](emitter, node, names)
            emitter.tensors.update(zip(node.outputs, made, strict=True))
            state.update(_new_state(emitter, node))
        else:
            emit_row_op(emitter, node, names)
    for name, value in graph.outputs.items():
        layers.output(emitter.tensor(value), name, layers.data_type(value.dtype))
    for old, tensor in state.items():
        name = f"{old.name}'"
        if old.name.endswith((".k", ".v")):
            layers.mark(tensor, name)  # the cache's own memory: no copy of it
        else:
            layers.output(layers.cast(tensor, old.dtype), name, layers.data_type(old.dtype))


def _is_state(value: Value) -> bool:
    return "." in value.name


def _input_shape(value: Value) -> tuple[int, ...]:
    if not _is_state(value):
        return value.shape if len(value.shape) == 1 else (value.num_rows, *value.row_shape)
    is_kept_twice = value.name.endswith((".pending_k", ".pending_log_g"))
    return (value.shape[0] // PENDING_HALVES, *value.shape[1:]) if is_kept_twice else value.shape


def _new_state(e: Emitter, node: Node) -> dict[Value, Any]:
    """The state that went in -> what this node leaves for the next pass, in the shape in which that takes it."""
    given = node.inputs
    match node.op:
        case Op.ATTEND:
            return {given[3]: e.tensors[node.outputs[1]], given[4]: e.tensors[node.outputs[2]]}
        case Op.CONV_COMMIT | Op.DELTA_FOLD:
            return {given[0]: e.tensors[node.outputs[0]]}
        case Op.CAUSAL_CONV if given[1].producer is not None:
            return {given[1].producer.inputs[1]: _rows(e, given[0], given[0].dtype)}
        case Op.GATED_DELTA_RULE:
            _, k, _, log_g, _, state, old_k, old_u, old_log_g, _ = given
            kept = {old_k: k, old_u: node.outputs[2], old_log_g: log_g}
            return {state: e.tensors[node.outputs[1]], **{old: _rows(e, new, F32) for old, new in kept.items()}}
        case _:
            return {}


def _rows(e: Emitter, value: Value, dtype: Dtype) -> Any:
    """[B, N, ...] of a row value."""
    return e.layers.reshape(e.tensor(value, dtype), value.shape)


def _flat(e: Emitter, tensor: Any, value: Value) -> Any:
    return e.layers.reshape(tensor, (value.num_rows, *value.row_shape))


def _int(values: Any) -> Any:
    return np.asarray(values, np.int32)


# --- tokens and positions ---


def _embed(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    table = e.weight_input(names[0], node.weights[0].shape, e.layers.data_type(Dtype.FLOAT16))
    return (e.layers.cast(e.layers.gather(table, e.tensors[node.inputs[0]]), F32),)


def _gather_rows(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    x, index = node.inputs
    first = np.repeat(np.arange(x.shape[0]) * x.shape[1], index.shape[1])
    return (e.layers.gather(e.tensors[x], e.layers.add(e.tensors[index], e.layers.constant(_int(first)))),)


def _token_positions(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    num_rows, num_tokens = node.outputs[0].shape
    start = e.layers.reshape(e.tensors[node.inputs[0]], (num_rows, 1))
    positions = e.layers.add(start, e.layers.constant(_int(np.arange(num_tokens)[None])))
    return (e.layers.reshape(positions, (num_rows * num_tokens,)),)


def _rope_angles(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    frequencies, magnitude = node.attrs
    positions = layers.cast(e.tensors[node.inputs[0]], F32)
    column = layers.reshape(positions, (node.inputs[0].num_rows, 1))
    angles = layers.mul(column, layers.constant(np.asarray(frequencies, np.float32)[None]))
    parts = (layers.unary(angles, kind) for kind in ("COS", "SIN"))
    return tuple(part if magnitude == 1.0 else layers.scale(part, float(str(magnitude))) for part in parts)


# --- attention ---


def _attend(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    return (_attend_fp8 if node.inputs[3].dtype is Dtype.FP8 else _attend_native)(e, node, names)


def _attend_native(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    """Query n of row b sees positions up to start[b] + n of the cache in which its own tokens already stand."""
    layers = e.layers
    q, k, v, k_cache, v_cache, start = node.inputs
    num_rows, num_tokens = q.shape[:2]
    keys, values = (
        layers.update_cache(e.tensors[cache], _by_head(e, new), e.tensors[start])
        for new, cache in ((k, k_cache), (v, v_cache))
    )
    first = layers.reshape(e.tensors[start], (num_rows, 1, 1, 1))
    last = layers.add(first, layers.constant(_int(np.arange(num_tokens)[None, None, :, None])))
    ahead = layers.binary(layers.constant(_int(np.arange(k_cache.shape[2])[None, None, None])), last, "GREATER")
    mixed = layers.attention(_queries(e, node), keys, values, layers.unary(ahead, "NOT"))
    return _flat(e, layers.transpose(mixed, (0, 2, 1, 3)), node.outputs[0]), keys, values


def _attend_fp8(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    """Decomposed, as IKVCacheUpdate takes no FP8 ("cache has type FP8 but must have type Float, Half, or BFloat16"):
    softmax([q K_past^T | q K_new^T]) without a copy of the cache; the new entries leave as outputs [B, H_kv, N, d].
    """
    layers = e.layers
    q, k, v, k_cache, v_cache, start = node.inputs
    _, k_scale, v_scale = (float(str(number)) for number in node.attrs)
    num_rows, num_tokens, num_heads, size = q.shape
    num_kv, length = k_cache.shape[1:3]
    group = num_heads // num_kv
    new = [layers.quantize(_by_head(e, value), scale) for value, scale in ((k, k_scale), (v, v_scale))]
    keys = [layers.dequantize(tensor, k_scale) for tensor in (e.tensors[k_cache], new[0])]
    values = [layers.dequantize(tensor, v_scale) for tensor in (e.tensors[v_cache], new[1])]
    queries = layers.reshape(_queries(e, node), (num_rows, num_kv, group * num_tokens, size))
    past, own = (layers.cast(layers.matmul(queries, key, transpose_b=True), F32) for key in keys)

    first = layers.reshape(e.tensors[start], (num_rows, 1, 1, 1))
    is_past = layers.binary(layers.constant(_int(np.arange(length)[None, None, None])), first, "LESS")
    past = layers.select(is_past, past, layers.scalar(_CLOSED, 4, past.dtype))
    causal = np.tile(np.where(np.tri(num_tokens, dtype=bool), 0.0, _CLOSED), (group, 1)).astype(np.float32)
    own = layers.add(own, layers.constant(causal[None, None]))
    weights = layers.cast(layers.softmax_last(layers.concat([past, own], 3)), Dtype.FLOAT16)
    parts = (layers.take_last(weights, 0, length), layers.take_last(weights, length, num_tokens))
    mixed = layers.add(*(layers.matmul(part, value) for part, value in zip(parts, values, strict=True)))
    mixed = layers.transpose(layers.reshape(mixed, (num_rows, num_heads, num_tokens, size)), (0, 2, 1, 3))
    return _flat(e, mixed, node.outputs[0]), *new


def _by_head(e: Emitter, value: Value) -> Any:
    """[B, H, N, d] in float16."""
    return e.layers.transpose(_rows(e, value, Dtype.FLOAT16), (0, 2, 1, 3))


def _queries(e: Emitter, node: Node) -> Any:
    """Scaled before the product, in float32: the attention layer has no scale of its own."""
    scale = float(str(node.attrs[0]))
    scaled = e.layers.cast(e.layers.scale(_rows(e, node.inputs[0], F32), scale), Dtype.FLOAT16)
    return e.layers.transpose(scaled, (0, 2, 1, 3))


# --- Gated DeltaNet ---


def _conv_commit(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    tail, pending, commit = node.inputs
    (num_rows, kept, width), total = tail.shape, tail.shape[1] + pending.shape[1]
    joined = layers.reshape(layers.concat([e.tensors[tail], e.tensors[pending]], 1), (num_rows * total, width))
    first = layers.constant(_int(np.arange(num_rows)[:, None] * total + np.arange(kept)))
    index = layers.add(layers.reshape(e.tensors[commit], (num_rows, 1)), first)
    rows = layers.gather(joined, layers.reshape(index, (num_rows * kept,)))
    return (layers.reshape(rows, tail.shape),)


def _causal_conv(e: Emitter, node: Node, names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    x, tail = node.inputs
    channels, _, taps = node.weights[0].shape
    weight = e.weight_input(names[0], (channels, taps), layers.data_type(F32))
    joined = layers.concat([layers.cast(e.tensors[tail], F32), _rows(e, x, F32)], 1)
    y = None
    for tap in range(taps):
        factor = layers.reshape(layers.take_last(weight, tap, 1), (1, 1, channels))
        term = layers.mul(layers.take(joined, 1, tap, x.shape[1]), factor)
        y = term if y is None else layers.add(y, term)
    return (_flat(e, layers.silu(y), node.outputs[0]),)


def _gated_delta_rule(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    q, k, v, log_g, beta, state, *pending, commit = node.inputs
    folded = _fold(e, state, pending, commit)
    num_rows, num_tokens, num_keys, key_dim = k.shape
    num_values, value_dim = v.shape[2:]
    grouped = (num_rows, num_keys, num_values // num_keys)
    both = layers.concat([_rows(e, value, F32) for value in (q, k)], 1)  # [B, 2N, H_k, d_k]
    both = layers.reshape(layers.transpose(both, (0, 2, 1, 3)), (*grouped[:2], 1, 2 * num_tokens, key_dim))
    keys = layers.take(both, 3, num_tokens, num_tokens)
    from_state = layers.matmul(both, layers.reshape(folded, (*grouped, key_dim, value_dim)))  # [B, H_k, R, 2N, d_v]
    products = layers.matmul(both, keys, transpose_b=True)  # [B, H_k, 1, 2N, N]

    decay = _per_head(e, log_g, F32, grouped)  # [B, H_k, R, 1, N]
    since_start = layers.reshape(
        layers.unary(layers.matmul(decay, _matrix(layers, np.tri(num_tokens).T)), "EXP"),
        (*grouped, num_tokens, 1),
    )
    gamma = _ratios(layers, decay, grouped, num_tokens)
    beta_column = layers.reshape(_per_head(e, beta, F32, grouped), (*grouped, num_tokens, 1))
    values = layers.reshape(layers.transpose(_rows(e, v, F32), (0, 2, 1, 3)), (*grouped, num_tokens, value_dim))
    read, predicted = (layers.take(from_state, 3, begin, num_tokens) for begin in (0, num_tokens))
    rhs = layers.mul(beta_column, layers.sub(values, layers.mul(since_start, predicted)))
    mixing, overlap = (layers.take(products, 3, begin, num_tokens) for begin in (0, num_tokens))
    u = _solve(layers, layers.mul(layers.mul(beta_column, gamma), overlap), rhs)
    out = layers.add(layers.mul(since_start, read), layers.matmul(layers.mul(gamma, mixing), u))
    back = (num_rows, num_values, num_tokens, value_dim)
    out, u = (layers.transpose(layers.reshape(value, back), (0, 2, 1, 3)) for value in (out, u))
    return _flat(e, out, node.outputs[0]), folded, _flat(e, u, node.outputs[2])


def _per_head(e: Emitter, value: Value, dtype: Dtype, grouped: tuple[int, int, int]) -> Any:
    """[B, N, H_v] -> [B, H_k, R, 1, N]."""
    tensor = e.layers.transpose(_rows(e, value, dtype), (0, 2, 1))
    return e.layers.reshape(tensor, (*grouped, 1, value.shape[1]))


def _ratios(layers: Layers, log_g: Any, grouped: tuple[int, int, int], count: int) -> Any:
    """exp(sum of log g over i < j <= t) for i <= t, else 0: [B, H_k, R, N, N]."""
    t, i, j = np.ogrid[:count, :count, :count]
    between = ((i < j) & (j <= t)).reshape(count * count, count)
    sums = layers.reshape(layers.matmul(log_g, _matrix(layers, between.T)), (*grouped, count, count))
    closed = np.where(np.tri(count, dtype=bool), 0.0, _CLOSED)
    return layers.unary(layers.add(sums, _matrix(layers, closed)), "EXP")


def _matrix(layers: Layers, values: Any) -> Any:
    """A float32 constant [1, 1, 1, rows, columns]: products want both sides of one rank."""
    return layers.constant(np.asarray(values, np.float32)[None, None, None])


def _fold(e: Emitter, state: Value, pending: list[Value], commit: Value) -> Any:
    """S' = G_n S + sum_{i<=n} (G_n / G_i) k_i u_i^T with n = commit[b]."""
    layers = e.layers
    k, u, log_g = (e.tensors[value] for value in pending)
    num_rows, count, num_keys, key_dim = k.shape
    num_values, value_dim = u.shape[2:]
    grouped = (num_rows, num_keys, num_values // num_keys)
    kept = layers.binary(
        layers.constant(_int(np.arange(count)[None, None])), layers.reshape(e.tensors[commit], (num_rows, 1, 1)), "LESS"
    )
    decay = layers.transpose(log_g, (0, 2, 1))  # [B, H_v, N]
    decay = layers.select(kept, decay, layers.scalar(0.0, 3, decay.dtype))
    after = np.tril(np.ones((count, count), np.float32), -1)  # sums over what comes after i
    exponent = layers.matmul(decay, layers.constant(after[None]))
    ratio = layers.unary(layers.select(kept, exponent, layers.scalar(_CLOSED, 3, decay.dtype)), "EXP")
    total = layers.unary(layers.mean_last(decay, is_sum=True), "EXP")
    weighted = layers.mul(layers.transpose(u, (0, 2, 1, 3)), layers.reshape(ratio, (num_rows, num_values, count, 1)))
    weighted = layers.reshape(weighted, (*grouped, count, value_dim))
    columns = layers.reshape(layers.transpose(k, (0, 2, 3, 1)), (num_rows, num_keys, 1, key_dim, count))
    added = layers.reshape(layers.matmul(columns, weighted), state.shape)
    decayed = layers.mul(e.tensors[state], layers.reshape(total, (num_rows, num_values, 1, 1)))
    return layers.add(decayed, added)


def _delta_fold(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    state, *pending, commit = node.inputs
    return (_fold(e, state, pending, commit),)


def _solve(layers: Layers, coupling: Any, rhs: Any) -> Any:
    """(I + strict_lower(coupling))^-1 rhs, blocks of at most eight rows on the diagonal and substitution below."""
    count = rhs.shape[-2]
    strict = layers.mul(coupling, _matrix(layers, np.tri(count, k=-1)))
    solved: Any = None
    for begin in range(0, count, _BLOCK):
        size = min(_BLOCK, count - begin)
        rows, block = layers.take(strict, 3, begin, size), layers.take(rhs, 3, begin, size)
        if solved is not None:
            block = layers.sub(block, layers.matmul(layers.take_last(rows, 0, begin), solved))
        part = layers.matmul(_inverse(layers, layers.take_last(rows, begin, size), size), block)
        solved = part if solved is None else layers.concat([solved, part], 3)
    return solved


def _inverse(layers: Layers, strict: Any, size: int) -> Any:
    """(I + A)^-1 = (I - A)(I + A^2)(I + A^4)."""
    identity = _matrix(layers, np.eye(size))
    inverse, power, reach = layers.sub(identity, strict), strict, 2
    while reach < size:
        power = layers.matmul(power, power)
        inverse = layers.matmul(inverse, layers.add(identity, power))
        reach *= 2
    return inverse


# --- scores ---


def _arg_max(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    _, ids = e.layers.top_k(e.tensor(node.inputs[0], F32), 1)
    return (e.layers.reshape(ids, (node.inputs[0].num_rows,)),)


def _top_k(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    count = node.attrs[0]
    if not isinstance(count, int):
        raise BuildError(f"top_k: {count!r} is not a count")
    values, ids = e.layers.top_k(e.tensor(node.inputs[0], F32), count)
    return values, ids


def _log_sum_exp(e: Emitter, node: Node, _names: tuple[str, ...]) -> tuple[Any, ...]:
    layers = e.layers
    x = e.tensor(node.inputs[0], F32)
    largest = layers.reduce_last(x, "MAX")
    total = layers.mean_last(layers.unary(layers.sub(x, largest), "EXP"), is_sum=True)
    result = layers.add(largest, layers.unary(total, "LOG"))
    return (layers.reshape(result, (node.inputs[0].num_rows,)),)


WHOLE_LOWERINGS: dict[Op, WholeLowering] = {
    Op.EMBED: _embed,
    Op.GATHER_ROWS: _gather_rows,
    Op.TOKEN_POSITIONS: _token_positions,
    Op.ROPE_ANGLES: _rope_angles,
    Op.ATTEND: _attend,
    Op.CONV_COMMIT: _conv_commit,
    Op.CAUSAL_CONV: _causal_conv,
    Op.GATED_DELTA_RULE: _gated_delta_rule,
    Op.DELTA_FOLD: _delta_fold,
    Op.ARG_MAX: _arg_max,
    Op.TOP_K: _top_k,
    Op.LOG_SUM_EXP: _log_sum_exp,
}
