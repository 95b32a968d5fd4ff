"""The executor on a GPU: recorded passes as CUDA graphs, state in device memory, one synchronisation per round.

Rounds (tensorrt_rounds.py) and prompts (tensorrt_prompts.py) have a lane each: a prompt is read while a round of other
rows is under way. The host takes part once in a round: it fills a block of integers, launches, waits, reads a few KB.
Drafts are the head's argmax. What greedy rows accept follows from the results alone, so the device can advance the
block by itself, and the next round is launched before this one's results are read.

Slots. The loop's slot s is the physical slot `_slots[s]`; every kernel goes through that table, so exchanging two rows
exchanges two numbers and moves no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_worker.engine.build.passes import Recorder, StateLayout
from edgellm_worker.engine.build.plan import memory_kind
from edgellm_worker.engine.build.weight_policy import WeightReader
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.graph import Lowering
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.executor import (
    DraftChooser,
    PrefillChunk,
    RoundInput,
    RoundOutput,
    StartedPrefill,
    StartedRound,
)
from edgellm_worker.engine.runtime.scores import RoundScores
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Kernels
from edgellm_worker.engine.runtime.tensorrt_lane import Machine
from edgellm_worker.engine.runtime.tensorrt_program import Engines, Parts
from edgellm_worker.engine.runtime.tensorrt_prompts import Prompts
from edgellm_worker.engine.runtime.tensorrt_rounds import Rounds
from edgellm_worker.engine.runtime.tensorrt_weights import WeightStore


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
        model = model if layout.max_verify > 1 else model.without_mtp()
        self._layout = layout
        self._cuda = cuda
        self._engines = engines
        self._slots = list(range(layout.num_slots))
        weights = WeightStore(cuda)
        parts = Parts(cuda, weights, Kernels(cuda, weights), engines)
        state, self._state_bytes = _reserve_state(model, layout, cuda)
        recorder = Recorder(model, layout, reader)
        self.machine = Machine(model, recorder, parts, state, options.lowering, options.use_graphs)
        self.rounds = Rounds(self.machine, layout)
        self.prompts = Prompts(self.machine, layout, options.prefill_chunk)

    @property
    def num_slots(self) -> int:
        return self._layout.num_slots

    @property
    def can_draft(self) -> bool:
        return self.machine.model.mtp is not None

    @property
    def runs_ahead(self) -> bool:
        return True

    @property
    def follows(self) -> bool:
        return True

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"weights": self.machine.parts.weights.num_bytes, **self._state_bytes}

    def close(self) -> None:
        """The library's contexts before the device memory they point into."""
        self.prompts.finish()
        self._cuda.synchronize()
        self._engines.close()
        self._cuda.close()

    def warm_up(self, draft_lengths: Sequence[int]) -> None:
        """Run every pass twice, so that none is captured while jobs wait. Before the first row: it writes rubbish into
        caches, which rows overwrite before they see it. The largest first: the scratch that kernels share stays
        where it is, and what fits those fits the rest.
        """
        for size in reversed(self.prompts.sizes):
            for _ in range(2):
                self.prefill(0, PrefillChunk(np.zeros(min(size, self._layout.capacity - 1), np.int32), 0, 0))
        for num_rows in range(self.num_slots, 0, -1):
            zeros = np.zeros(num_rows, np.int32)
            batch = RoundInput(np.zeros((num_rows, 1), np.int32), zeros + 1, zeros + 1, zeros)
            for num_drafts in sorted(draft_lengths, reverse=True):
                for _ in range(2):
                    self.run_round(batch, num_drafts)

    def clear(self, slot: int) -> None:
        physical = self._slots[slot]
        self.prompts.clear(physical, self.rounds.end_with(physical))

    def swap(self, a: int, b: int) -> None:
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]

    def start_prefill(self, slot: int, chunk: PrefillChunk) -> StartedPrefill:
        return self.prompts.start(self._slots[slot], chunk)

    def prefill(self, slot: int, chunk: PrefillChunk) -> RoundScores | None:
        """A piece of a prompt, waited for."""
        return self.start_prefill(slot, chunk).wait().scores

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> StartedRound:
        return self.rounds.start(batch, num_drafts, self._slots[: len(choosers)])

    def follow_round(
        self, num_drafts: int, places: Sequence[int | None], joining: RoundInput | None = None
    ) -> StartedRound:
        return self.rounds.follow(num_drafts, self._slots[: len(places)], places, joining)

    def run_round(self, batch: RoundInput, num_drafts: int) -> RoundOutput:
        """A round, waited for: of as many rows as `batch` has."""
        return self.rounds.start(batch, num_drafts, self._slots[: len(batch.position)])()


def _reserve_state(model: Model, layout: StateLayout, cuda: Cuda) -> tuple[dict[str, Binding], dict[str, int]]:
    """All slots' state, zeros, and its bytes by kind."""
    state: dict[str, Binding] = {}
    sizes = {"kv_cache": 0, "recurrent_state": 0, "pending": 0}
    for name, (shape, dtype) in layout.tensors(model).items():
        num_bytes = int(np.prod(shape)) * dtype.num_bytes
        state[name] = Binding(cuda.allocate(num_bytes, zero=True))
        sizes[memory_kind(name)] += num_bytes
    return state, sizes
