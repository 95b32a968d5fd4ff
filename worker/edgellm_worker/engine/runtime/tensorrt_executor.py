"""The executor on a GPU: recorded passes as CUDA graphs, state in device memory, one synchronisation per round.

A round with B rows and K drafts is one graph, captured on first use and replayed from then on:

    copy in   slots, positions, committed counts, pairs      (one page-locked block, int32)
    draft     first pass over the pairs -> draft 1 -> next pass -> ... -> draft K      ids land where verify reads them
    verify    base over [last token, drafts] -> candidates
    copy out  drafts, candidates, log-sum-exp

The host takes part once: it fills the block, launches, waits, reads a few KB. Drafts are the head's argmax.

Slots. The loop's slot s is the physical slot `_slots[s]`; every kernel goes through that table, so exchanging two rows
exchanges two numbers and moves no state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_worker.engine.build.passes import Recorder, StateLayout
from edgellm_worker.engine.build.plan import memory_kind
from edgellm_worker.engine.build.profiles import prompt_sizes
from edgellm_worker.engine.build.weight_policy import WeightReader
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.graph import Graph, Lowering
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.cuda import Graph as CudaGraph
from edgellm_worker.engine.runtime.executor import (
    DraftChooser,
    PrefillChunk,
    RoundInput,
    RoundOutput,
    StartedRound,
)
from edgellm_worker.engine.runtime.scores import NUM_CANDIDATES, Candidates, RoundScores, Scores
from edgellm_worker.engine.runtime.tensorrt_block import Block
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Control, Kernels, Mode
from edgellm_worker.engine.runtime.tensorrt_layout import lay_out
from edgellm_worker.engine.runtime.tensorrt_program import Bindings, Engines, Parts, Program
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore

_log = logging.getLogger(__name__)

_CLEARING_BLOCKS = 8  # for each tensor of a slot


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """`prefill_chunk`: the longest prompt piece run at once. `use_graphs` False launches every kernel by itself."""

    prefill_chunk: int = 128
    use_graphs: bool = True
    lowering: Lowering = Lowering.ROWS


class TensorRtExecutor:
    """`Executor`. `engines` holds the plans for this model (see build/passes.py); owns and closes `cuda`."""

    def __init__(
        self,
        model: Model,
        layout: StateLayout,
        cuda: Cuda,
        engines: Engines,
        reader: WeightReader,
        options: TensorRtOptions,
    ) -> None:
        self._model = model if layout.max_verify > 1 else model.without_mtp()
        self._layout = layout
        self._cuda = cuda
        self._engines = engines
        self._options = options
        weights = WeightStore(cuda)
        self._parts = Parts(cuda, weights, Kernels(cuda, weights), engines)
        self._recorder = Recorder(self._model, layout, reader)
        self._slots = list(range(layout.num_slots))
        self._parity = [0] * layout.num_slots
        self._state: dict[str, Binding] = {}
        self._state_bytes: dict[str, int] = {}
        self._reserved = {"kv_cache": 0, "recurrent_state": 0, "pending": 0}
        for name, (shape, dtype) in layout.tensors(self._model).items():
            num_bytes = int(np.prod(shape)) * dtype.num_bytes
            self._state[name] = Binding(cuda.allocate(num_bytes, zero=True))
            self._state_bytes[name] = num_bytes
            self._reserved[memory_kind(name)] += num_bytes
        self._block = Block(cuda, layout, options.prefill_chunk)
        self._outputs = _Outputs(cuda, self._model, layout, options.prefill_chunk)
        self._arena = cuda.allocate(self._arena_bytes())
        self._clear = self._make_clear()
        self._rounds: dict[tuple[int, int], _Pass] = {}
        self._prefills: dict[int, _Pass] = {}

    @property
    def num_slots(self) -> int:
        return self._layout.num_slots

    @property
    def can_draft(self) -> bool:
        return self._model.mtp is not None

    @property
    def runs_ahead(self) -> bool:
        return True

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Weights are uploaded when they are first read; the state is reserved at the start."""
        return {"weights": self._parts.weights.num_bytes, **self._reserved}

    def close(self) -> None:
        """The library's contexts before the device memory they point into."""
        self._cuda.synchronize()
        self._rounds.clear()
        self._prefills.clear()
        self._engines.close()
        self._cuda.close()

    def warm_up(self, draft_lengths: Sequence[int]) -> None:
        """Run every pass twice, so that none is captured while jobs wait. Before the first row: it writes rubbish into
        caches, which rows overwrite before they see it. The largest first: the scratch that kernels share stays
        where it is, and what fits those fits the rest.
        """
        for size in reversed(self._prefill_sizes()):
            for _ in range(2):
                self.prefill(0, PrefillChunk(np.zeros(min(size, self._layout.capacity - 1), np.int32), 0, 0))
        for num_rows in range(self.num_slots, 0, -1):
            zeros = np.zeros(num_rows, np.int32)
            batch = RoundInput(np.zeros((num_rows, 1), np.int32), zeros + 1, zeros + 1, zeros)
            for num_drafts in sorted(draft_lengths, reverse=True):
                for _ in range(2):
                    self.run_round(batch, num_drafts, [_no_choice] * num_rows)

    def clear(self, slot: int) -> None:
        """Caches need none of it: a row never sees positions it did not write."""
        self._clear(self._slots[slot])

    def _make_clear(self) -> Callable[[int], None]:
        """One launch for all of a slot's recurrent state: pointers and sizes lie on the device."""
        names = [name for name in self._state if memory_kind(name) == "recurrent_state"]
        if not names:
            return lambda _slot: None
        table = [(self._state[name].pointer, self._state_bytes[name] // self._layout.num_slots) for name in names]
        spans = self._cuda.upload(np.array(table, np.uint64))
        kernel = self._parts.kernels.token_kernel("clear_slot", "pi")
        grid = (_CLEARING_BLOCKS, len(names), 1)
        return lambda physical: self._cuda.run(kernel, grid, 256, (spans, physical))

    def swap(self, a: int, b: int) -> None:
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]

    # --- prefill ---

    def prefill(self, slot: int, chunk: PrefillChunk) -> RoundScores | None:
        """Long pieces go in parts of at most `prefill_chunk`."""
        most, scores = self._options.prefill_chunk, None
        for begin in range(0, len(chunk.ids), most):
            ids = chunk.ids[begin : begin + most]
            end = begin + len(ids)
            next_id = chunk.next_id if end == len(chunk.ids) else int(chunk.ids[end])
            scores = self._prefill_part(slot, PrefillChunk(ids, chunk.start + begin, next_id))
        return scores

    def _prefill_part(self, slot: int, chunk: PrefillChunk) -> RoundScores | None:
        count = len(chunk.ids)
        size = next(size for size in self._prefill_sizes() if size >= count)
        self._block.fill_prefill(self._slots[slot], chunk)
        if size not in self._prefills:
            self._prefills[size] = self._make_prefill(size)
        self._prefills[size].run()
        self._cuda.synchronize()
        if chunk.next_id is not None:
            return None
        logits = self._outputs.prefill_logits.astype(np.float32)
        return RoundScores(1, None, lambda _row, _position: logits)

    def _prefill_sizes(self) -> list[int]:
        return prompt_sizes(self._options.prefill_chunk)

    def _make_prefill(self, size: int) -> _Pass:
        block, outputs, cuda = self._block, self._outputs, self._cuda
        values = {**self._state, **block.prefill_bindings(), **outputs.prefill_bindings()}
        base = self._program(self._recorder.prefill(size), values, 1, Mode.PREFILL)
        fill = None
        if self.can_draft:
            fill = self._program(self._recorder.draft_fill(size), values, 1, Mode.PREFILL)
            put = self._slot_kernel("put_slots", "pppiii", 1)
            width = self._model.config.hidden_size

        def record() -> None:
            block.upload()
            base.enqueue()
            if fill is not None:
                fill.enqueue()
                source, kept = outputs.last_hidden, self._state["carried"].pointer
                put(source, block.slots, kept, 1, width, self._layout.max_verify)
            outputs.download_prefill()

        return _Pass(record, cuda, use_graph=self._options.use_graphs)

    # --- rounds ---

    def run_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> RoundOutput:
        return self.start_round(batch, num_drafts, choosers)()

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> StartedRound:
        began = time.perf_counter()
        num_rows = len(choosers)
        physical = self._slots[:num_rows]
        self._block.fill_round(batch, num_drafts, physical, self._parity)
        key = (num_rows, num_drafts)
        if key not in self._rounds:
            self._rounds[key] = self._make_round(num_rows, num_drafts)
        self._rounds[key].run()
        for slot in physical:
            self._parity[slot] ^= 1

        def finish() -> RoundOutput:
            self._cuda.synchronize()
            return self._outputs.read_round(num_rows, num_drafts, began)

        return finish

    def _make_round(self, num_rows: int, num_drafts: int) -> _Pass:
        block, outputs, record = self._block, self._outputs, self._recorder
        width = num_drafts + 1
        values = {**self._state, **block.round_bindings(width), **outputs.round_bindings(num_rows, width)}
        programs: list[Program] = []
        if self.can_draft:
            first = record.draft_first(num_rows, is_chosen=num_drafts > 0)
            drafted = {**values, "draft": Binding(block.ids + 4, width)}
            programs.append(self._program(first, drafted, num_rows, Mode.STEP))
            for step in range(1, num_drafts):
                bound = {
                    **values,
                    "before": Binding(block.ids + 4 * step, width),
                    "next_start": Binding(block.next_start(step)),
                    "draft": Binding(block.ids + 4 * (step + 1), width),
                    "y": outputs.hidden_row(step - 1),
                    "y_next": outputs.hidden_row(step),
                }
                programs.append(self._program(record.draft_next(num_rows), bound, num_rows, Mode.STEP))
        programs.append(self._program(record.verify(num_rows, width), values, num_rows, Mode.STEP))
        hidden_size = self._model.config.hidden_size
        take = self._slot_kernel("take_slots", "pppii", num_rows * self._layout.max_verify) if self.can_draft else None
        put = self._slot_kernel("put_slots", "pppiii", num_rows * width) if self.can_draft else None

        def enqueue() -> None:
            block.upload()
            if take is not None:
                kept = self._state["carried"].pointer
                take(kept, block.slots, outputs.taken, self._layout.max_verify, hidden_size)
            for program in programs:
                program.enqueue()
            if put is not None:
                kept = self._state["carried"].pointer
                put(outputs.hidden, block.slots, kept, width, hidden_size, self._layout.max_verify)
            outputs.download_round(num_rows, width, block.ids)

        return _Pass(enqueue, self._cuda, use_graph=self._options.use_graphs)

    # --- programs ---

    def _program(self, graph: Graph, values: Mapping[str, Binding], batch: int, mode: Mode) -> Program:
        layout = lay_out(graph, frozenset(values), self._options.lowering)
        control = Control(self._block.slots, self._block.parity, batch)
        return Program(graph, layout, self._parts, Bindings(values, self._arena, control, mode))

    def _arena_bytes(self) -> int:
        """The most any pass needs. Smaller batches and fewer drafts need less of the same."""
        record, bound = self._recorder, frozenset({*self._state, *self._block.names(), *_Outputs.NAMES})
        graphs = record.all(self._options.prefill_chunk).values()
        return max(lay_out(graph, bound, self._options.lowering).num_bytes for graph in graphs)

    def _slot_kernel(self, name: str, signature: str, num_blocks: int) -> Any:
        kernel = self._parts.kernels.token_kernel(name, signature)
        return lambda *arguments: self._cuda.run(kernel, (num_blocks, 1, 1), 256, arguments)


def _no_choice(_scores: Scores, _position: int) -> int:
    return 0


class _Pass:
    """The first run goes kernel by kernel (libraries set themselves up then), later ones are one graph."""

    def __init__(self, record: Any, cuda: Cuda, *, use_graph: bool) -> None:
        self._record = record
        self._cuda = cuda
        self._use_graph = use_graph
        self._has_run = False
        self._graph: CudaGraph | None = None

    def run(self) -> None:
        if self._graph is not None:
            self._graph.launch()
            return
        if self._has_run and self._use_graph:
            self._graph = self._cuda.capture(self._record)
            self._graph.launch()
            return
        self._record()
        self._has_run = True


class _Outputs:
    """Where passes leave results on the device, and the page-locked arrays they are copied to."""

    NAMES = ("hidden", "verified", "last_hidden", "logits", "values", "best", "log_sum_exp", "y", "y_next", "draft")

    def __init__(self, cuda: Cuda, model: Model, layout: StateLayout, prefill_chunk: int) -> None:
        self._cuda = cuda
        rows = layout.num_slots * layout.max_verify
        self._vocab, width = model.config.vocab_size, model.config.hidden_size
        self._candidates = min(NUM_CANDIDATES, self._vocab)
        self.hidden = cuda.allocate(2 * width * max(rows, prefill_chunk))
        self.last_hidden = cuda.allocate(2 * width)
        self.taken = cuda.allocate(2 * width * rows)
        self._drafted = [cuda.allocate(2 * width * layout.num_slots) for _ in range(2)]
        self._logits = cuda.allocate(2 * self._vocab * rows)
        self._scores = cuda.allocate(4 * rows * (2 * self._candidates + 1))
        self._host_scores = cuda.pinned((rows * (2 * self._candidates + 1),), np.int32)
        self._host_ids = cuda.pinned((rows,), np.int32)
        self._host_logits = cuda.pinned((self._vocab,), np.float16)

    @property
    def prefill_logits(self) -> Array:
        return self._host_logits

    def hidden_row(self, step: int) -> Binding:
        """Draft outputs alternate between two places."""
        return Binding(self._drafted[step % 2])

    def prefill_bindings(self) -> dict[str, Binding]:
        pointers = {"hidden": self.hidden, "last_hidden": self.last_hidden, "logits": self._logits}
        return {name: Binding(pointer) for name, pointer in pointers.items()}

    def round_bindings(self, num_rows: int, width: int) -> dict[str, Binding]:
        """Candidates, their ids and log-sum-exps lie one after another, so that one copy brings them all."""
        count = num_rows * width * self._candidates
        pointers = {
            "hidden": self.taken,
            "verified": self.hidden,
            "logits": self._logits,
            "values": self._scores,
            "best": self._scores + 4 * count,
            "log_sum_exp": self._scores + 8 * count,
            "y": self._drafted[0],
        }
        return {name: Binding(pointer) for name, pointer in pointers.items()}

    def download_prefill(self) -> None:
        self._cuda.download_async(self._logits, self._host_logits)

    def download_round(self, num_rows: int, width: int, ids: int) -> None:
        count = num_rows * width
        self._cuda.download_async(self._scores, self._host_scores[: count * (2 * self._candidates + 1)])
        self._cuda.download_async(ids, self._host_ids[:count])

    def read_round(self, num_rows: int, num_drafts: int, began: float) -> RoundOutput:
        """Copies: the page-locked arrays are overwritten by the next round."""
        width, k = num_drafts + 1, self._candidates
        count = num_rows * width
        flat = self._host_scores[: count * (2 * k + 1)].copy()
        values = flat[: count * k].view(np.float32).reshape(num_rows, width, k)
        ids = flat[count * k : 2 * count * k].reshape(num_rows, width, k)
        sums = flat[2 * count * k :].view(np.float32).reshape(num_rows, width)

        def read_logits(row: int, position: int) -> Array:
            place = self._logits + 2 * (row * width + position) * self._vocab
            return self._cuda.download(place, (self._vocab,), np.float16).astype(np.float32)

        drafts = self._host_ids[:count].reshape(num_rows, width)[:, 1:].copy()
        scores = RoundScores(width, Candidates(values, ids, sums), read_logits)
        return RoundOutput(drafts, scores, 0.0, time.perf_counter() - began)
