"""The block of integers that steers a pass: filled on the host, copied to the device as the pass begins.

    slots [B]  parity [S]  start [B]  commit [B]  draft_start [B]  last_row [B]  next_start [K, B]  pairs [B, P]
    ids [B, K+1] or one prompt chunk    next_ids [chunk]    count, nothing

It is one allocation with offsets fixed for the largest pass: one copy carries everything, addresses never change.
"""

from __future__ import annotations

import numpy as np

from edgellm_worker.engine.build.passes import StateLayout
from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.runtime.cuda import Cuda
from edgellm_worker.engine.runtime.executor import PrefillChunk, RoundInput
from edgellm_worker.engine.runtime.tensorrt_kernels import Binding


class Block:
    def __init__(self, cuda: Cuda, layout: StateLayout, prefill_chunk: int) -> None:
        self._cuda = cuda
        self._width = layout.max_verify
        rows = layout.num_slots
        sizes = {
            "slots": rows,
            "parity": rows,
            "start": rows,
            "commit": rows,
            "draft_start": rows,
            "last_row": rows,
            "count": 1,
            "nothing": 1,
            "next_start": rows * layout.max_verify,
            "pairs": rows * layout.max_verify,
            "ids": max(rows * layout.max_verify, prefill_chunk),
            "next_ids": prefill_chunk,
        }
        total = sum(sizes.values())
        self._host: Array = cuda.pinned((total,), np.int32)
        self._host[:] = 0
        self._device = cuda.allocate(4 * total)
        self._views: dict[str, Array] = {}
        self._pointers: dict[str, int] = {}
        offset = 0
        for name, size in sizes.items():
            self._views[name] = self._host[offset : offset + size]
            self._pointers[name] = self._device + 4 * offset
            offset += size
        self._num_rows = rows
        self._indices = np.arange(rows)

    @property
    def slots(self) -> int:
        return self._pointers["slots"]

    @property
    def parity(self) -> int:
        return self._pointers["parity"]

    @property
    def ids(self) -> int:
        return self._pointers["ids"]

    def next_start(self, step: int) -> int:
        """The positions of the entries that draft `step` (from 1) makes."""
        return self._pointers["next_start"] + 4 * self._num_rows * step

    def names(self) -> tuple[str, ...]:
        return tuple(self._views)

    def upload(self) -> None:
        self._cuda.upload_async(self._host, self._device)

    def prefill_bindings(self) -> dict[str, Binding]:
        return {name: Binding(pointer) for name, pointer in self._pointers.items()}

    def round_bindings(self, width: int) -> dict[str, Binding]:
        del width
        return {name: Binding(pointer) for name, pointer in self._pointers.items()}

    def fill_prefill(self, slot: int, chunk: PrefillChunk) -> None:
        views, count = self._views, len(chunk.ids)
        views["slots"][0] = slot
        views["start"][0] = chunk.start
        views["count"][0] = count
        views["last_row"][0] = count - 1
        views["ids"][:] = 0
        views["ids"][:count] = chunk.ids
        views["next_ids"][:] = 0
        views["next_ids"][: count - 1] = chunk.ids[1:]
        if chunk.next_id is not None:
            views["next_ids"][count - 1] = chunk.next_id

    def fill_round(self, batch: RoundInput, num_drafts: int, slots: list[int], parity: list[int]) -> None:
        views, rows = self._views, len(slots)
        views["slots"][:rows] = slots
        views["parity"][:] = parity
        views["start"][:rows] = batch.position
        views["commit"][:rows] = batch.commit
        views["draft_start"][:rows] = batch.position - batch.num_pairs
        views["last_row"][:rows] = batch.num_pairs - 1
        for step in range(1, num_drafts):
            begin = step * self._num_rows
            views["next_start"][begin : begin + rows] = batch.position + (step - 1)
        pairs = views["pairs"][: rows * self._width].reshape(rows, self._width)
        pairs[:, : batch.pairs.shape[1]] = batch.pairs[:, : self._width]
        ids = views["ids"][: rows * (num_drafts + 1)].reshape(rows, num_drafts + 1)
        ids[:, 0] = batch.pairs[self._indices[:rows], batch.num_pairs - 1]
