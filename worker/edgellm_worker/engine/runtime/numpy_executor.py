"""The executor of the reference engine: the models run eagerly on numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from edgellm_worker.engine.checkpoint.weights import Array
from edgellm_worker.engine.models.layers import DeltaNetState, fold
from edgellm_worker.engine.models.mtp import Mtp
from edgellm_worker.engine.models.registry import Model
from edgellm_worker.engine.ops.reference import NumpyOps
from edgellm_worker.engine.runtime.executor import (
    DraftChooser,
    Int,
    PrefillChunk,
    PrefillOutput,
    RoundInput,
    RoundOutput,
    StartedPrefill,
    StartedRound,
    attended_length,
)
from edgellm_worker.engine.runtime.numpy_state import NumpyState, StateShape
from edgellm_worker.engine.runtime.scores import DenseScores, RoundScores


class NumpyExecutor:
    """`Executor`. A model with a draft head is drafted only if `shape.max_verify` leaves room for drafts."""

    def __init__(self, model: Model, shape: StateShape) -> None:
        self._ops = NumpyOps()
        self._base = model.base
        self._mtp = model.mtp if shape.max_verify > 1 else None
        self._shape = shape
        self._state = NumpyState(model if self._mtp else model.without_mtp(), shape)

    @property
    def num_slots(self) -> int:
        return self._shape.num_slots

    @property
    def can_draft(self) -> bool:
        return self._mtp is not None

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        return {"weights": self._ops.decoded_bytes, **self._state.memory_bytes}

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def follows(self) -> bool:
        return False

    def clear(self, slot: int) -> None:
        self._state.clear(slot)

    def swap(self, a: int, b: int) -> None:
        self._state.swap(a, b)

    def close(self) -> None:
        """Nothing outside the process is held."""

    def start_prefill(self, slot: int, chunk: PrefillChunk) -> StartedPrefill:
        return StartedPrefill(lambda: True, partial(self._prefill, slot, chunk))

    def _prefill(self, slot: int, chunk: PrefillChunk) -> PrefillOutput:
        began = time.perf_counter()
        scores = self._read(slot, chunk)
        return PrefillOutput(scores, time.perf_counter() - began)

    def _read(self, slot: int, chunk: PrefillChunk) -> RoundScores | None:
        rows = slice(slot, slot + 1)
        start, num_tokens = np.array([chunk.start], np.int32), len(chunk.ids)
        nothing, everything = np.zeros(1, np.int32), np.array([num_tokens], np.int32)
        memory = self._state.base(rows, nothing, self._attended(start, num_tokens))
        hidden, after = self._base.run(self._ops, chunk.ids[None], memory, start, nothing)
        folded = [fold(self._ops, m, everything) if isinstance(m, DeltaNetState) else m for m in after]
        self._state.store_base(rows, folded)
        self._state.note_written(rows, start + everything)
        if self._mtp is not None:
            next_ids = chunk.ids[1:] if chunk.next_id is None else np.append(chunk.ids[1:], np.int32(chunk.next_id))
            if next_ids.size:
                self._run_mtp(self._mtp, rows, next_ids[None], hidden[:, : next_ids.size], start)
        if chunk.next_id is not None:
            return None
        self._state.hidden[slot, 0] = hidden[0, -1]
        return self._scores(hidden[:, -1:])

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> StartedRound:
        """Nothing runs before it is waited for: there is nobody else to run it."""
        return partial(self._run_round, batch, num_drafts, choosers)

    def follow_round(
        self, num_drafts: int, places: Sequence[int | None], joining: RoundInput | None = None
    ) -> StartedRound:
        raise NotImplementedError("nothing runs before it is waited for")

    def _run_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> RoundOutput:
        began = time.perf_counter()
        drafts = np.zeros((len(choosers), 0), np.int32)
        if self._mtp is not None:
            drafts = self._draft(self._mtp, batch, num_drafts, choosers)
        drafted = time.perf_counter()
        last = np.take_along_axis(batch.pairs, batch.num_pairs[:, None] - 1, axis=1)
        scores = self._verify(np.concatenate((last, drafts), axis=1), batch)
        return RoundOutput(drafts, scores, drafted - began, time.perf_counter() - drafted)

    def _draft(self, mtp: Mtp, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> Int:
        """The chain: true pairs first, then each draft with the head's own output -> int32 [B, num_drafts]."""
        num_rows, width = batch.pairs.shape
        rows = slice(0, num_rows)
        first = batch.position - batch.num_pairs
        hidden = self._run_mtp(mtp, rows, batch.pairs, self._state.hidden[rows, :width], first)
        drafts = np.zeros((num_rows, num_drafts), np.int32)
        if not num_drafts:
            return drafts
        hidden = self._ops.gather_rows(hidden, batch.num_pairs[:, None] - 1)
        for step in range(num_drafts):
            if step:
                hidden = self._run_mtp(mtp, rows, drafts[:, step - 1 : step], hidden, batch.position + (step - 1))
            logits = self._base.logits(self._ops, hidden[:, 0])
            positions = (batch.position + 1 + step).tolist()
            for row, (choose, position) in enumerate(zip(choosers, positions, strict=True)):
                drafts[row, step] = choose(DenseScores(logits[row]), position)
        return drafts

    def _verify(self, ids: Int, batch: RoundInput) -> RoundScores:
        num_rows, num_tokens = ids.shape
        rows = slice(0, num_rows)
        memory = self._state.base(rows, batch.commit, self._attended(batch.position, num_tokens))
        hidden, after = self._base.run(self._ops, ids, memory, batch.position, batch.commit)
        self._state.store_base(rows, after)
        self._state.note_written(rows, batch.position + num_tokens)
        self._state.hidden[rows, :num_tokens] = hidden
        return self._scores(hidden)

    def _scores(self, hidden: Array) -> RoundScores:
        """Hidden states [B, N, D] -> the scores of what follows each."""
        logits = self._base.logits(self._ops, hidden)
        return RoundScores(hidden.shape[1], None, lambda row, position: logits[row, position])

    def _run_mtp(self, mtp: Mtp, rows: slice, ids: Int, hidden: Array, start: Int) -> Array:
        """The head over some slots' entries; the cache is written in place."""
        cache = self._state.draft(rows, self._attended(start, ids.shape[1]))
        y, _ = mtp.run(self._ops, ids, hidden, cache, start)
        return y

    def _attended(self, start: Int, num_tokens: int) -> int:
        return attended_length(int(start.max()) + num_tokens, self._shape.capacity)
