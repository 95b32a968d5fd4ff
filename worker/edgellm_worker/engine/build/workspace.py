"""Device memory of passes beside weights and state, from their recordings: what `plan` counts before there is a GPU.

    values    the arenas of prompts and of rounds: each as large as the largest pass's
    results   hidden states, logits, candidates, and the integers that steer a pass
    scratch   what blocks of a kernel that share their work leave for each other, and what networks hold inside

Prompts and rounds may run at the same time, so that all of this is there for each. A prompt's passes do not depend on
the batch and a round's grow with it, so one recording serves all batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from edgellm_worker.engine.build.passes import Recorder
from edgellm_worker.engine.build.profiles import prompt_sizes
from edgellm_worker.engine.build.segments import Segment, cut
from edgellm_worker.engine.build.spec import EngineSpec
from edgellm_worker.engine.models.config import ModelConfig
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.graph import Graph, Lowering, Op, Value
from edgellm_worker.engine.runtime.attention_split import AttentionSplit
from edgellm_worker.engine.runtime.packed_linear import Variant
from edgellm_worker.engine.runtime.scores import NUM_CANDIDATES
from edgellm_worker.engine.runtime.tensorrt_layout import STEP_TOKENS, lay_out

_MULTIPROCESSORS: Final = 132
"""Of a large GPU. Partial sums of products go by them; with fewer (a Thor has 20) they are smaller."""
_BLOCKS: Final = 2  # of a product, on a multiprocessor
_PRODUCT_BYTES: Final = 4 * 48 * 64  # one block's partial sums in kernels/linear.cu


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Of the passes of one draft length: a prompt's as a whole and, for each slot, a round's. `packs`: whether a
    product's weight is packed.
    """

    prompt_values: int
    prompt_network: int
    slot_values: int
    slot_network: int
    packs: bool

    @classmethod
    def of(cls, model: Model, spec: EngineSpec) -> PassBytes:
        record = Recorder(model, spec.layout, spec.reader(has_values=False))
        prompt = [record.prefill(spec.prefill_chunk)]
        rounds = [record.verify(1, spec.max_verify)]
        if model.mtp is not None:
            prompt.append(record.draft_fill(spec.prefill_chunk))
            rounds += [record.draft_first(1, is_chosen=True), record.draft_next(1)]
        return cls(
            prompt_values=_values(prompt, spec.lowering),
            prompt_network=_network(prompt, spec.lowering),
            slot_values=_values(rounds, spec.lowering),
            slot_network=_network(rounds, spec.lowering),
            packs=any(node.op is Op.PACKED_LINEAR for graph in rounds for node in graph.nodes),
        )


def workspace_bytes(model: Model, spec: EngineSpec, passes: PassBytes) -> int:
    """`model` with a draft head only where there is room for drafts."""
    values = passes.prompt_values + spec.max_batch_size * passes.slot_values
    return values + _results(model.config, spec) + _scratch(model.config, spec, passes)


def _values(graphs: Iterable[Graph], lowering: Lowering) -> int:
    """Outputs have places of their own."""
    return max(lay_out(graph, frozenset(graph.outputs), lowering).num_bytes for graph in graphs)


def _network(graphs: Iterable[Graph], lowering: Lowering) -> int:
    """Everything that the layers of the largest network make, as if nothing were reused."""
    segments = [step for graph in graphs for step in cut(graph, lowering) if isinstance(step, Segment)]
    made = [[value for node in segment.nodes for value in node.outputs] for segment in segments]
    return max((sum(map(_num_bytes, values)) for values in made), default=0)


def _num_bytes(value: Value) -> int:
    return int(np.prod(value.shape)) * value.dtype.num_bytes


def _results(config: ModelConfig, spec: EngineSpec) -> int:
    slots, chunk = spec.max_batch_size, spec.prefill_chunk
    rows = slots * spec.max_verify
    hidden = 2 * config.hidden_size * (chunk + 1 + 2 * rows + 2 * slots)
    scores = (rows + 1) * (2 * config.vocab_size + 4 * (2 * min(NUM_CANDIDATES, config.vocab_size) + 1))
    changes = 2 * (5 * slots + rows)
    steering = 4 * (6 * slots + 3 * rows + changes + 5 + slots + 2 * chunk)
    return hidden + scores + steering


def _scratch(config: ModelConfig, spec: EngineSpec, passes: PassBytes) -> int:
    rows = spec.max_batch_size * spec.max_verify
    candidates = 8 * (rows + 1) * (NUM_CANDIDATES + 1) * -(-config.vocab_size // 4096)
    packed = Variant(is_fp4=True, x_tiles=6).partial_bytes if passes.packs else 0
    dense = _PRODUCT_BYTES if spec.lowering is Lowering.PRODUCTS else 0
    blocks = _BLOCKS * _MULTIPROCESSORS
    network = max(passes.prompt_network, spec.max_batch_size * passes.slot_network)
    return _attention(config, spec) + candidates + 2 * (blocks * (packed + dense) + network)


def _attention(config: ModelConfig, spec: EngineSpec) -> int:
    """Partial results of the prompt pieces that leave most, long and short, and of the largest round."""
    attention, capacity = config.attention, spec.max_kv_cache_capacity
    heads = (attention.num_heads, attention.head_dim)
    prompts = [(1, size, *heads) for size in prompt_sizes(spec.prefill_chunk)]
    round_ = (spec.max_batch_size, spec.max_verify, *heads)  # by the prompt's kernel where no step's has such heads
    of_prompt, of_step = (
        partial(make, num_kv_heads=attention.num_kv_heads, capacity=capacity)
        for make in (AttentionSplit.of_prompt, AttentionSplit.of_step)
    )
    longest = max(of_prompt(q).num_bytes for q in prompts)
    largest_round = max(of_prompt(round_).num_bytes, of_step(round_).num_bytes)
    return longest + of_step((1, STEP_TOKENS, *heads)).num_bytes + largest_round
