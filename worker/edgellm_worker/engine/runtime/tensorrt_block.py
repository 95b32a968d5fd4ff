"""The integers that steer passes: filled on the host and copied to the device before a pass, or written there by the
end of the pass before (kernels/advance.cu).

    rounds     slots [B]  parity [S]  start [B]  commit [B]  draft_start [B]  last_row [B]  next_start [P, B]
               pairs [B, P]  ids [B, K+1], and behind them a round's results, which come back with them in one copy
    changes    places [B]  slots [B]  start [B]  commit [B]  count [B]  pairs [B, P]
    prompts    slots [1]  parity [S]  start [1]  count, nothing, last_row [1]  ids and next_ids [chunk]

A block is one allocation with offsets fixed for the largest pass: one copy carries everything, addresses never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgellm_worker.engine.build.passes import StateLayout
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.runtime.executor import Int, PrefillChunk, RoundInput
from edgellm_worker.engine.runtime.tensorrt_place import Binding

if TYPE_CHECKING:
    from edgellm_worker.engine.runtime.cuda import Cuda

_STEERING = ("start", "commit", "draft_start", "last_row")


class Integers:
    """Named int32 arrays, page-locked on the host and again on the device."""

    def __init__(self, cuda: Cuda, sizes: Mapping[str, int]) -> None:
        self._cuda = cuda
        self.host: Array = cuda.pinned((sum(sizes.values()),), np.int32)
        self.host[:] = 0
        self.device = cuda.allocate(self.host.nbytes)
        self._places: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, size in sizes.items():
            self._places[name] = (offset, size)
            offset += size
        self.bindings = {name: Binding(self.pointer(name)) for name in sizes}

    def pointer(self, name: str) -> int:
        return self.device + 4 * self._places[name][0]

    def view(self, name: str, array: Array | None = None) -> Array:
        """Of the host's array, or of a copy of the device's."""
        offset, size = self._places[name]
        return (self.host if array is None else array)[offset : offset + size]

    def upload(self) -> None:
        self._cuda.upload_async(self.host, self.device)


class RoundBlock(Integers):
    """`result_words`: room behind it for what a round gives."""

    def __init__(self, cuda: Cuda, layout: StateLayout, result_words: int = 0) -> None:
        rows, width = layout.num_slots, layout.max_verify
        few = dict.fromkeys(("slots", "parity", *_STEERING), rows)
        many = dict.fromkeys(("next_start", "pairs", "ids"), rows * width)
        super().__init__(cuda, {**few, **many, "results": result_words})
        self.num_slots, self.width = rows, width
        begin, _ = self._places[_STEERING[0]]
        self._steering = self.host[begin : begin + len(_STEERING) * rows].reshape(len(_STEERING), rows)
        self._next_start = self.view("next_start").reshape(width, rows)
        self._later = np.arange(max(width - 2, 0), dtype=np.int32)[:, None]
        self._rows = np.arange(rows)

    def ids(self, position: int) -> int:
        """Where the verified token of each row at `position` lies: 0 the last committed one, then the drafts."""
        return self.pointer("ids") + 4 * position

    def next_start(self, step: int) -> int:
        """The positions of the entries that draft `step` (from 1) makes."""
        return self.pointer("next_start") + 4 * self.num_slots * step

    def upload(self) -> None:
        self._cuda.upload_async(self.host[: self._places["results"][0]], self.device)

    def download(self, num_words: int, place: Array) -> None:
        """With so many words of results, to a page-locked array of the host's size."""
        self._cuda.download_async(self.device, place[: self._places["results"][0] + num_words])

    def fill(self, batch: RoundInput, num_drafts: int, slots: Sequence[int], parity: Sequence[int]) -> None:
        rows = len(slots)
        self.view("slots")[:rows] = slots
        self.view("parity")[:] = parity
        steering = (batch.position, batch.commit, batch.position - batch.num_pairs, batch.num_pairs - 1)
        self._steering[:, :rows] = steering
        if num_drafts > 1:
            self._next_start[1:num_drafts, :rows] = batch.position + self._later[: num_drafts - 1]
        pairs = self.view("pairs")[: rows * self.width].reshape(rows, self.width)
        pairs[:, : batch.pairs.shape[1]] = batch.pairs[:, : self.width]
        ids = self.view("ids")[: rows * (num_drafts + 1)].reshape(rows, num_drafts + 1)
        ids[:, 0] = batch.pairs[self._rows[:rows], batch.num_pairs - 1]

    def read(self, copy: Array, num_rows: int, num_drafts: int) -> tuple[RoundInput, Int]:
        """What a round was steered by, and its drafts [B, K], from a copy of the device's array."""
        pairs = self.view("pairs", copy)[: num_rows * self.width].reshape(num_rows, self.width)
        last_row, start, commit = (self.view(name, copy)[:num_rows] for name in ("last_row", "start", "commit"))
        ids = self.view("ids", copy)[: num_rows * (num_drafts + 1)].reshape(num_rows, num_drafts + 1)
        return RoundInput(pairs, last_row + 1, start, commit), ids[:, 1:]


class ChangeBlock(Integers):
    """Who is in the round that follows: for each row its place in the round before, or -1 and what it starts from."""

    def __init__(self, cuda: Cuda, layout: StateLayout) -> None:
        rows, width = layout.num_slots, layout.max_verify
        super().__init__(
            cuda, {**dict.fromkeys(("places", "slots", "start", "commit", "count"), rows), "pairs": rows * width}
        )
        self.width = width

    def fill(self, places: Sequence[int | None], slots: Sequence[int], joining: RoundInput | None) -> None:
        rows = len(slots)
        self.view("slots")[:rows] = slots
        self.view("places")[:rows] = [-1 if place is None else place for place in places]
        if joining is None:
            return
        new = [row for row, place in enumerate(places) if place is None]
        for name, values in (("start", joining.position), ("commit", joining.commit), ("count", joining.num_pairs)):
            self.view(name)[new] = values
        pairs = self.view("pairs").reshape(-1, self.width)
        pairs[new, : joining.pairs.shape[1]] = joining.pairs[:, : self.width]


class PromptBlock(Integers):
    def __init__(self, cuda: Cuda, layout: StateLayout, prefill_chunk: int) -> None:
        one = dict.fromkeys(("slots", "start", "last_row", "count", "nothing"), 1)
        super().__init__(cuda, {**one, "parity": layout.num_slots, "ids": prefill_chunk, "next_ids": prefill_chunk})

    def fill(self, slot: int, chunk: PrefillChunk) -> None:
        count = len(chunk.ids)
        ids, next_ids = self.view("ids"), self.view("next_ids")
        self.view("slots")[0] = slot
        self.view("start")[0] = chunk.start
        self.view("count")[0] = count
        self.view("last_row")[0] = count - 1
        ids[:] = 0
        ids[:count] = chunk.ids
        next_ids[:] = 0
        next_ids[: count - 1] = chunk.ids[1:]
        if chunk.next_id is not None:
            next_ids[count - 1] = chunk.next_id
