"""What runs the model for the speculative loop: rows' device state, prefill, and one draft-and-verify round.

    slots     0 .. num_slots-1; a round covers slots 0 .. B-1, so the loop keeps its running rows there (`swap`)
    p         the position of a row's last committed token; its base-model entry is not made yet
    verified  a round runs the base model on [token_p, draft_1 .. draft_K] at positions p .. p+K; scores[i] is the
              distribution of token p+1+i
    commit    how many rows of a round's verify pass became tokens, token_p included: accepted drafts + 1. The next
              round folds that many into the recurrent state before it runs. 0 after a prefill, which folds its own
    pairs     the committed tokens the draft head has not seen with the base's own hidden states: after a prefill the
              first token; after a round the tokens it emitted. They end with token_p

Per row and round, with n = num_pairs: the head's first pass makes entries p-n .. p-1 from (base hidden, pair token),
its last output is the first draft; draft step j makes the provisional entry p-1+j. Provisional entries are overwritten
in the next round, also when all drafts were accepted (entry p+K-1 would not even exist otherwise).

Where every row takes the best raw score, a round says all that the next one needs: how many drafts are accepted, and
pairs, num_pairs, position and commit with that. An executor that `follows` works that out by itself and runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.runtime.scores import RoundScores, Scores

Int = NDArray[np.int32]

DraftChooser = Callable[[Scores, int], int]
"""A row's own choice of a draft for an absolute position (`RowSampler.draft`)."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Part of one row's prompt: `ids` int32 [N] at positions start .. start+N-1. `next_id` is the prompt token after
    them, None when they end the prompt.
    """

    ids: Int
    start: int
    next_id: int | None


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """`scores` of the token after the piece, of one row's one position, where it ended the prompt; None otherwise."""

    scores: RoundScores | None
    prefill_s: float


@dataclass(frozen=True, slots=True)
class StartedPrefill:
    """A piece of a prompt under way. `wait` is called once, and at once gives what the piece gave when it `is_over`."""

    is_over: Callable[[], bool]
    wait: Callable[[], PrefillOutput]


@dataclass(frozen=True, slots=True)
class RoundInput:
    """One round for slots 0 .. B-1; all int32. See above for the words.

    pairs      [B, W], left-justified, rubbish after num_pairs[b]
    num_pairs  [B], at least 1
    position   [B], p
    commit     [B], 0 .. W
    """

    pairs: Int
    num_pairs: Int
    position: Int
    commit: Int


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """`drafts` int32 [B, K]; scores of K + 1 positions. Seconds spent in the two models. `followed`: what the executor
    took the round to start from, where it worked that out by itself.
    """

    drafts: Int
    scores: RoundScores
    draft_s: float
    verify_s: float
    followed: RoundInput | None = None


StartedRound = Callable[[], RoundOutput]
"""A round under way: called once, it waits and says what the round gave."""


class Executor(Protocol):
    """Memory for every slot at full capacity is reserved when the executor is made; nothing grows later."""

    @property
    def num_slots(self) -> int: ...

    @property
    def can_draft(self) -> bool: ...

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """By kind: weights, kv_cache, recurrent_state, pending."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a round that was started runs by itself, so that starting it early hides the host's work, and prompts
        may be read beside it.
        """

    @property
    def follows(self) -> bool:
        """Whether `follow_round` can be had."""

    def clear(self, slot: int) -> None:
        """Forget the slot's row: the next one starts from zeros."""

    def swap(self, a: int, b: int) -> None:
        """Exchange the rows of two slots."""

    def start_prefill(self, slot: int, chunk: PrefillChunk) -> StartedPrefill:
        """Run and commit part of a prompt, one at a time. Rounds of other rows may be under way, or start, meanwhile
        only where the executor runs ahead.
        """

    def start_round(self, batch: RoundInput, num_drafts: int, choosers: Sequence[DraftChooser]) -> StartedRound:
        """Draft `num_drafts` tokens per row (0: none, the head just keeps up), then verify them.

        Every round is waited for before the next is started. Until then slots may be cleared, and swapped where the
        executor runs ahead: the round is of the rows that were there when it was started. An executor that drafts on
        the device may ignore the choosers and take argmax drafts.
        """

    def follow_round(
        self, num_drafts: int, places: Sequence[int | None], joining: RoundInput | None = None
    ) -> StartedRound:
        """The next round, before the one under way is waited for: its row b has the place `places[b]` in that one, and
        starts from the tokens that it gives when each row takes the best raw score; or None, and is the next of
        `joining`. Rows that are left out have left. At most one follows; the logits of the one before are then gone.
        """

    def close(self) -> None: ...


def attended_length(num_positions: int, capacity: int, smallest: int = 64) -> int:
    """The doubling bucket that holds `num_positions`: what a pass attends over, never more than the capacity."""
    length = smallest
    while length < num_positions:
        length *= 2
    return min(length, capacity)
