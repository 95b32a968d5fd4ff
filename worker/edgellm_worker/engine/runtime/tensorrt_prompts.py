"""Reading prompts on the GPU: a lane of its own, so that a piece is read while a round of other rows is under way.

A piece is one graph: the base over its tokens, their fold, the draft head over the pairs, and the candidates of what
follows. A slot that is cleared while the round under way still has its last row waits for that round.
"""

from __future__ import annotations

import numpy as np

from edgellm_worker.engine.build.passes import StateLayout
from edgellm_worker.engine.build.plan import memory_kind
from edgellm_worker.engine.build.profiles import prompt_sizes
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.runtime.cuda import Event
from edgellm_worker.engine.runtime.executor import PrefillChunk, PrefillOutput, StartedPrefill
from edgellm_worker.engine.runtime.scores import NUM_CANDIDATES, Candidates, RoundScores
from edgellm_worker.engine.runtime.tensorrt_block import PromptBlock
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding, Mode
from edgellm_worker.engine.runtime.tensorrt_lane import Lane, Machine, RecordedPass

_CLEARING_BLOCKS = 8  # for each tensor of a slot


class Prompts:
    """`chunk`: the longest piece read at once."""

    def __init__(self, machine: Machine, layout: StateLayout, chunk: int) -> None:
        cuda = machine.cuda
        self._machine = machine
        self._layout = layout
        self._chunk = chunk
        self._cuda = cuda
        self.block = PromptBlock(cuda, layout, chunk)
        self.results = _PromptResults(machine, chunk)
        self.lane = Lane(machine, cuda.new_stream(), self.block)
        recorder = machine.recorder
        graphs = [recorder.prefill(chunk)]
        if machine.model.mtp is not None:
            graphs.append(recorder.draft_fill(chunk))
        self.lane.reserve(graphs, self.results.bindings)
        self._passes: dict[int, RecordedPass] = {}
        self._begin, self._end = cuda.event(), cuda.event()
        self._spans, self._num_spans = self._recurrent_spans()

    @property
    def sizes(self) -> list[int]:
        return prompt_sizes(self._chunk)

    def start(self, slot: int, chunk: PrefillChunk) -> StartedPrefill:
        """A piece for a physical slot. One longer than `chunk` goes in parts, and is returned from in the last."""
        with self.lane.on():
            self._begin.record()
            for begin in range(0, len(chunk.ids), self._chunk):
                if begin:
                    self._end.wait()  # the block is to be filled anew
                ids = chunk.ids[begin : begin + self._chunk]
                end = begin + len(ids)
                next_id = chunk.next_id if end == len(chunk.ids) else int(chunk.ids[end])
                self._start_part(slot, PrefillChunk(ids, chunk.start + begin, next_id))
        return StartedPrefill(self._end.is_over, lambda: self._finish(ends_prompt=chunk.next_id is None))

    def _start_part(self, slot: int, chunk: PrefillChunk) -> None:
        self.block.fill(slot, chunk)
        self.pass_of(next(size for size in self.sizes if size >= len(chunk.ids))).run()
        self._end.record()

    def pass_of(self, size: int) -> RecordedPass:
        if size not in self._passes:
            self._passes[size] = self._make(size)
        return self._passes[size]

    def _finish(self, *, ends_prompt: bool) -> PrefillOutput:
        self._end.wait()
        scores = RoundScores(1, self.results.candidates(), self._read_logits) if ends_prompt else None
        return PrefillOutput(scores, self._end.seconds_since(self._begin))

    def _read_logits(self, _row: int, _position: int) -> Array:
        with self.lane.on():
            return self.results.read_logits()

    def _make(self, size: int) -> RecordedPass:
        machine, lane, block, results = self._machine, self.lane, self.block, self.results
        base = lane.program(machine.recorder.prefill(size), results.bindings, 1, Mode.PREFILL)
        fill = None
        if machine.model.mtp is not None:
            fill = lane.program(machine.recorder.draft_fill(size), results.bindings, 1, Mode.PREFILL)
            put = lane.token_kernel("put_slots", "pppiii", 1)
            source, kept = results.bindings["last_hidden"].pointer, machine.state["carried"].pointer
            width = machine.model.config.hidden_size

        def enqueue() -> None:
            block.upload()
            base.enqueue()
            if fill is not None:
                fill.enqueue()
                put(source, block.pointer("slots"), kept, 1, width, self._layout.max_verify)
            results.download()

        return lane.recorded(enqueue)

    def clear(self, slot: int, after: Event | None) -> None:
        """Zeros for a physical slot's recurrent state. Caches need none of it: a row never sees positions it did not
        write. `after`: the end of a round that has a row there.
        """
        with self.lane.on():
            if after is not None:
                after.hold_back()
            if self._num_spans:
                kernel = self._machine.parts.kernels.token_kernel("clear_slot", "pi")
                self._cuda.run(kernel, (_CLEARING_BLOCKS, self._num_spans, 1), 256, (self._spans, slot))

    def finish(self) -> None:
        """Nothing runs here afterwards."""
        with self.lane.on():
            self._cuda.synchronize()

    def _recurrent_spans(self) -> tuple[int, int]:
        """One launch clears all of a slot's tensors: their pointers and sizes lie on the device."""
        table = [
            (self._machine.state[name].pointer, int(np.prod(shape[1:])) * dtype.num_bytes)
            for name, (shape, dtype) in self._layout.tensors(self._machine.model).items()
            if memory_kind(name) == "recurrent_state"
        ]
        return (self._cuda.upload(np.array(table, np.uint64)) if table else 0), len(table)


class _PromptResults:
    """Where a piece leaves its results on the device, and the page-locked copy of the candidates after it."""

    def __init__(self, machine: Machine, chunk: int) -> None:
        self._cuda = machine.cuda
        vocab, width = machine.model.config.vocab_size, machine.model.config.hidden_size
        self._vocab, self._count = vocab, min(NUM_CANDIDATES, vocab)
        found = self._cuda.allocate(4 * (2 * self._count + 1))
        pointers = {
            "hidden": self._cuda.allocate(2 * width * chunk),
            "last_hidden": self._cuda.allocate(2 * width),
            "logits": self._cuda.allocate(2 * vocab),
            "values": found,
            "best": found + 4 * self._count,
            "log_sum_exp": found + 8 * self._count,
        }
        self.bindings = {name: Binding(pointer) for name, pointer in pointers.items()}
        self._host: Array = self._cuda.pinned((2 * self._count + 1,), np.int32)

    def download(self) -> None:
        self._cuda.download_async(self.bindings["values"].pointer, self._host)

    def candidates(self) -> Candidates:
        flat, count = self._host.copy(), self._count
        values, sums = flat[:count].view(np.float32), flat[2 * count :].view(np.float32)
        return Candidates(values[None, None], flat[None, None, count : 2 * count], sums[None])

    def read_logits(self) -> Array:
        return self._cuda.download(self.bindings["logits"].pointer, (self._vocab,), np.float16).astype(np.float32)
