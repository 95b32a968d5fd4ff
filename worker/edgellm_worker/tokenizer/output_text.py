"""The text of one row with its stop strings: what may be shown now, where it ends, and which tokens it took.

Stop strings are looked for in the text, so it does not matter how the model spelled one in tokens, nor how many tokens
a step accepted: ids are taken one at a time, and after each the earliest stop string that is complete ends the text.

    text      released | pending                 pending: may be the beginning of a stop string, not shown yet
    tokens    released | pending                 a token is released once a character that it finished is

A token is kept when the text needs it: with E_n the length of the text that n tokens settle, a text cut at length p
keeps the least n with E_n >= p. So token ids, log-probabilities and counts end with the text: the token in which a stop
string begins is kept only if characters before the stop came from it, and tokens after it are neither returned nor
counted. A row that ends otherwise (EOS, length, cancelled) keeps every token, and the bytes of an unfinished character
become U+FFFD.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgellm_worker.tokenizer.detokenizer import Detokenizer


class TextDelta(NamedTuple):
    """What became final: `num_tokens` is how many further tokens of those pushed, in order, belong to the text so far.

    `stopped` says that a stop string ended the row: the tokens pushed and not yet counted are to be dropped.
    """

    text: str
    num_tokens: int
    stopped: bool = False


class OutputText:
    """One row's text. Feed every committed token through `push`; `finish` when the row ends without a stop string."""

    __slots__ = (
        "_covered",
        "_detokenizer",
        "_ends",
        "_longest_stop",
        "_pending",
        "_released",
        "_settled",
        "_stop_strings",
        "_stopped",
    )

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = tuple(stop_strings)
        self._longest_stop = max(map(len, self._stop_strings), default=1)
        self._pending = ""
        self._released = 0  # characters
        self._covered = 0  # E_n of the last released token: at least `_released`
        self._settled = 0  # characters, released and pending
        self._ends: deque[int] = deque()  # E_n of every token not yet released
        self._stopped = False

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Take committed tokens; after `stopped` nothing more is taken."""
        for token_id in token_ids:
            if self._stopped:
                break
            self._take(self._detokenizer.push(token_id))
        if self._stopped:
            return self._release(len(self._pending))
        return self._release(len(self._pending) - self._held_back())

    def finish(self) -> TextDelta:
        """Everything that was held back: the row ended and no stop string was completed."""
        if self._stopped:
            return TextDelta("", 0, stopped=True)
        num_tokens = len(self._ends)
        text = self._pending + self._detokenizer.finish()
        self._ends.clear()
        self._pending = ""
        return TextDelta(text, num_tokens)

    def _take(self, text: str) -> None:
        self._settled += len(text)
        self._ends.append(self._settled)
        self._pending += text
        found = [at for at in map(self._pending.find, self._stop_strings) if at >= 0]
        if found:
            self._pending = self._pending[: min(found)]
            self._stopped = True

    def _held_back(self) -> int:
        """How many last characters of the pending text may begin a stop string."""
        pending = self._pending
        for length in range(min(len(pending), self._longest_stop - 1), 0, -1):
            tail = pending[-length:]
            for stop in self._stop_strings:
                if stop.startswith(tail):
                    return length
        return 0

    def _release(self, num_characters: int) -> TextDelta:
        text, self._pending = self._pending[:num_characters], self._pending[num_characters:]
        self._released += len(text)
        num_tokens = 0
        while self._covered < self._released:
            self._covered = self._ends.popleft()
            num_tokens += 1
        return TextDelta(text, num_tokens, stopped=self._stopped)
