"""Rounds on the GPU: a graph for each number of rows and drafts, captured on first use and replayed from then on.

    before    the block that steers it: copied in from the host, or advanced on the device from the round before
    graph     draft  first pass over the pairs -> draft 1 -> next pass -> ... -> draft K    ids land where verify reads
              verify base over [last token, drafts] -> candidates
    after     drafts, candidates, log-sum-exp and the block into one of two page-locked places, and a mark

Two rounds may be under way, the second advanced from the first: results have two places on the host, one on the device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from edgellm_worker.engine.build.passes import StateLayout
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.errors import EngineError
from edgellm_worker.engine.ops.graph import Graph
from edgellm_worker.engine.runtime.cuda import Cuda, Event
from edgellm_worker.engine.runtime.executor import RoundInput, RoundOutput, StartedRound
from edgellm_worker.engine.runtime.scores import NUM_CANDIDATES, Candidates, RoundScores
from edgellm_worker.engine.runtime.tensorrt_block import ChangeBlock, RoundBlock
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Mode
from edgellm_worker.engine.runtime.tensorrt_lane import Lane, Machine, RecordedPass
from edgellm_worker.engine.runtime.tensorrt_program import Program

CHANGES: Final = ("places", "slots", "start", "commit", "count", "pairs")
ADVANCED: Final = ("slots", "parity", "start", "commit", "draft_start", "last_row", "next_start", "pairs", "ids")
"""Parts of the blocks, as kernels/advance.cu takes them."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A round by its physical slots. `place` holds its results once `place.end` has come."""

    slots: tuple[int, ...]
    num_drafts: int
    place: _Place
    number: int


class Rounds:
    """`parity` of a physical slot changes with every round that it takes part in: which half of k and log g is read."""

    def __init__(self, machine: Machine, layout: StateLayout) -> None:
        cuda = machine.cuda
        self._machine = machine
        self._layout = layout
        self._cuda = cuda
        words_each = 2 * min(NUM_CANDIDATES, machine.model.config.vocab_size) + 1
        self.block = RoundBlock(cuda, layout, layout.num_slots * layout.max_verify * words_each)
        self.results = _RoundResults(machine, layout, self.block.pointer("results"))
        self.lane = Lane(machine, cuda.stream, self.block)
        self.lane.reserve(_largest(machine, layout), self.results.bindings(layout.num_slots, layout.max_verify))
        self._parity = [0] * layout.num_slots
        self._places = [_Place(cuda, self.block) for _ in range(2)]
        self._passes: dict[tuple[int, int], RecordedPass] = {}
        self._changes = [ChangeBlock(cuda, layout) for _ in range(2)]
        self._launched: list[_Launched] = []  # the last two
        self._advance = machine.parts.kernels.kernel("advance", "advance_rows", "p" * 16 + "i" * 7, {})

    def start(self, batch: RoundInput, num_drafts: int, slots: Sequence[int]) -> StartedRound:
        """For rows in these physical slots. No other round may be under way."""
        began = time.perf_counter()
        self.block.fill(batch, num_drafts, slots, self._parity)
        self.block.upload()
        launched = self._launch(tuple(slots), num_drafts)
        host_s = time.perf_counter() - began
        return lambda: self._finish(launched, host_s, is_advanced=False)

    def follow(
        self, num_drafts: int, slots: Sequence[int], places: Sequence[int | None], joining: RoundInput | None
    ) -> StartedRound:
        """The round after the last one, which may still be under way: of rows in these physical slots, which had these
        places in that one and have accepted what they would, or join.
        """
        if not self._launched:
            raise EngineError("there is no round to follow")
        last, block = self._launched[-1], self.block
        changes = [0] * len(CHANGES)
        if list(places) != list(range(len(last.slots))):
            changed = self._changes[last.number % 2]  # the other one may not have been copied yet
            changed.fill(places, slots, joining)
            changed.upload()
            changes = [changed.pointer(name) for name in CHANGES]
        best = self.results.bindings(len(last.slots), last.num_drafts + 1)["best"].pointer
        pointers = (*map(block.pointer, ADVANCED), *changes, best)
        rows = (len(last.slots), len(slots), block.num_slots)
        sizes = (*rows, block.width, last.num_drafts, num_drafts, self.results.num_candidates)
        threads = -(-max(rows[:2]) // 32) * 32
        self._cuda.run(self._advance, (1, 1, 1), threads, (*pointers, *sizes))
        launched = self._launch(tuple(slots), num_drafts)
        return lambda: self._finish(launched, 0.0, is_advanced=True)

    def end_with(self, slot: int) -> Event | None:
        """The end of the last round that has a row in this physical slot, where it may not have come yet."""
        ends = [launched.place.end for launched in self._launched if slot in launched.slots]
        return ends[-1] if ends else None

    def pass_of(self, num_rows: int, num_drafts: int) -> RecordedPass:
        key = (num_rows, num_drafts)
        if key not in self._passes:
            self._passes[key] = self._make(num_rows, num_drafts)
        return self._passes[key]

    def _launch(self, slots: tuple[int, ...], num_drafts: int) -> _Launched:
        rows, number = len(slots), self._launched[-1].number + 1 if self._launched else 0
        place = self._places[number % 2]
        recorded = self.pass_of(rows, num_drafts)
        place.begin.record()
        recorded.run()
        self.block.download(rows * (num_drafts + 1) * self.results.words_each, place.numbers)
        place.end.record()
        for slot in slots:
            self._parity[slot] ^= 1
        self._launched = [*self._launched[-1:], _Launched(slots, num_drafts, place, number)]
        return self._launched[-1]

    def _finish(self, launched: _Launched, host_s: float, *, is_advanced: bool) -> RoundOutput:
        place, rows, num_drafts = launched.place, len(launched.slots), launched.num_drafts
        place.end.wait()
        numbers = place.numbers.copy()  # the next round but one comes to the same place
        steering, drafts = self.block.read(numbers, rows, num_drafts)
        candidates = self.results.candidates(self.block.view("results", numbers), rows, num_drafts + 1)

        def read_logits(row: int, position: int) -> Array:
            if launched is not self._launched[-1]:
                raise EngineError("the next round has overwritten the logits")
            return self.results.read_logits(row * (num_drafts + 1) + position)

        scores = RoundScores(num_drafts + 1, candidates, read_logits)
        took_s = host_s + place.end.seconds_since(place.begin)
        return RoundOutput(drafts, scores, 0.0, took_s, steering if is_advanced else None)

    # --- passes ---

    def _make(self, num_rows: int, num_drafts: int) -> RecordedPass:
        machine, layout, lane = self._machine, self._layout, self.lane
        width, hidden_size = num_drafts + 1, machine.model.config.hidden_size
        results = self.results.bindings(num_rows, width)
        take = put = None
        if machine.model.mtp is not None:
            take = lane.token_kernel("take_slots", "pppii", num_rows * layout.max_verify)
            put = lane.token_kernel("put_slots", "pppiii", num_rows * width)
            kept, slots = machine.state["carried"].pointer, self.block.pointer("slots")
        programs = self._drafting(num_rows, num_drafts)
        programs.append(lane.program(machine.recorder.verify(num_rows, width), results, num_rows, Mode.STEP))

        def enqueue() -> None:
            if take is not None:
                take(kept, slots, results["hidden"].pointer, layout.max_verify, hidden_size)
            for program in programs:
                program.enqueue()
            if put is not None:
                put(results["verified"].pointer, slots, kept, width, hidden_size, layout.max_verify)

        return lane.recorded(enqueue)

    def _drafting(self, num_rows: int, num_drafts: int) -> list[Program]:
        """Each draft lands among the ids that are verified, and is the next one's input there."""
        machine, lane, block = self._machine, self.lane, self.block
        if machine.model.mtp is None:
            return []
        width = num_drafts + 1
        results = self.results.bindings(num_rows, width)
        places = [Binding(block.ids(step), width) for step in range(self._layout.max_verify)]
        first = machine.recorder.draft_first(num_rows, is_chosen=num_drafts > 0)
        programs = [lane.program(first, {**results, "draft": places[min(1, num_drafts)]}, num_rows, Mode.STEP)]
        for step in range(1, num_drafts):
            values = {
                **results,
                "before": places[step],
                "next_start": Binding(block.next_start(step)),
                "draft": places[step + 1],
                "y": self.results.drafted[(step - 1) % 2],
                "y_next": self.results.drafted[step % 2],
            }
            programs.append(lane.program(machine.recorder.draft_next(num_rows), values, num_rows, Mode.STEP))
        return programs


def _largest(machine: Machine, layout: StateLayout) -> list[Graph]:
    recorder, rows = machine.recorder, layout.num_slots
    graphs = [recorder.verify(rows, layout.max_verify)]
    if machine.model.mtp is not None:
        graphs += [recorder.draft_first(rows, is_chosen=is_chosen) for is_chosen in (True, False)]
        graphs.append(recorder.draft_next(rows))
    return graphs


class _Place:
    """Where the block and a round's results arrive on the host, and the marks around it."""

    def __init__(self, cuda: Cuda, block: RoundBlock) -> None:
        self.numbers: Array = cuda.pinned(block.host.shape, np.int32)
        self.begin, self.end = cuda.event(), cuda.event()


class _RoundResults:
    """Where rounds leave their results on the device. Candidates, their ids and log-sum-exps lie one after another, at
    `scores`, so that one copy brings them all.
    """

    def __init__(self, machine: Machine, layout: StateLayout, scores: int) -> None:
        cuda, config = machine.cuda, machine.model.config
        rows, width = layout.num_slots * layout.max_verify, config.hidden_size
        self._cuda = cuda
        self._vocab = config.vocab_size
        self.num_candidates = min(NUM_CANDIDATES, config.vocab_size)
        self.words_each = 2 * self.num_candidates + 1
        self._taken, self._verified = (cuda.allocate(2 * width * rows) for _ in range(2))
        self.drafted = [Binding(cuda.allocate(2 * width * layout.num_slots)) for _ in range(2)]  # by turns
        self._logits = cuda.allocate(2 * config.vocab_size * rows)
        self._scores = scores

    def bindings(self, num_rows: int, width: int) -> dict[str, Binding]:
        count = num_rows * width * self.num_candidates
        pointers = {
            "hidden": self._taken,
            "verified": self._verified,
            "logits": self._logits,
            "values": self._scores,
            "best": self._scores + 4 * count,
            "log_sum_exp": self._scores + 8 * count,
        }
        return {**{name: Binding(pointer) for name, pointer in pointers.items()}, "y": self.drafted[0]}

    def candidates(self, words: Array, num_rows: int, width: int) -> Candidates:
        shape, count = (num_rows, width, self.num_candidates), num_rows * width * self.num_candidates
        flat = words[: num_rows * width * self.words_each]
        values, ids, sums = (flat[begin:end] for begin, end in pairwise((0, count, 2 * count, flat.size)))
        return Candidates(
            values.view(np.float32).reshape(shape),
            ids.reshape(shape),
            sums.view(np.float32).reshape(num_rows, width),
        )

    def read_logits(self, index: int) -> Array:
        place = self._logits + 2 * index * self._vocab
        return self._cuda.download(place, (self._vocab,), np.float16).astype(np.float32)
