"""One row of a native call, read from its stream channel.

The runtime pushes a chunk per row and round, with these habits (its streaming source):
- the chunk's tokens include the final EOS;
- a chunk is held back while its text is empty (half a character), so one chunk may carry several rounds;
- a cancelled row stops at the next round's end and is reported CANCELLED, with the tokens of that round;
- a call that fails closes all its channels with ERROR, whichever row was at fault: what that means is for the call to
  say (`take_rest`, `fail`), so a channel's own ERROR only ends the reading.

A row here ends at its own limit or at an EOS of its own request, whichever comes first: the surplus is dropped, the
channel cancelled, and the reason told as LENGTH or STOP. Callers never see CANCELLED.

Acceptance. The first token comes from the prompt. After that a round of K drafts commits between 1 and K+1 tokens, so n
tokens took at least r = ceil(n / (K+1)) rounds: a chunk of n <= K+1 tokens is one round with n-1 accepted drafts, which
is exact; a longer chunk is told as r updates of at most K+1 tokens each, which is a lower bound on its rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from edgellm_worker.engine.api import FinishReason, GenerationRequest, RowUpdate, TokenLogprobs
from edgellm_worker.engine.edgellm.native import NativeChannel

_FINISH_REASONS: Final = {
    "END_ID": FinishReason.STOP,
    "STOP_WORDS": FinishReason.STOP,
    "LENGTH": FinishReason.LENGTH,
}

_ERROR: Final = "ERROR"


class Row:
    """`num_drafts` is K for a drafted row, 0 for any other."""

    def __init__(self, row_id: int, request: GenerationRequest, num_drafts: int, drafting_off: str | None) -> None:
        self.row_id = row_id
        self.request = request
        self.is_done = False
        self.num_accepted = 0
        self._num_drafts = num_drafts
        self._drafting_off = drafting_off
        self._channel: NativeChannel | None = None
        self._channel_failed = False
        self._token_ids: list[int] = []
        self._updates: deque[RowUpdate] = deque()

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    @property
    def is_gone(self) -> bool:
        """Ended, and everything was told."""
        return self.is_done and not self._updates

    @property
    def channel(self) -> NativeChannel | None:
        """The channel while the runtime may still write tokens that anyone wants."""
        return None if self.is_done or self._channel_failed else self._channel

    def attach(self, channel: NativeChannel) -> None:
        self._channel = channel
        self._channel_failed = False

    def next_update(self) -> RowUpdate | None:
        """At most one per step."""
        return self._updates.popleft() if self._updates else None

    def pull(self) -> None:
        """Take what the channel holds. "Finished" is read before the queue is emptied: the runtime pushes a row's last
        chunk first and marks the channel after.
        """
        channel = self.channel
        if channel is None:
            return
        is_finished = channel.is_finished()
        while self.channel is not None and (chunk := channel.try_pop()) is not None:
            self._take_chunk(chunk)
        if is_finished and self.channel is not None:
            self._take([], [], channel.get_reason().name)

    def wait(self, timeout_ms: int) -> None:
        """Wait for the next chunk and take it."""
        channel = self.channel
        if channel is not None and (chunk := channel.wait_pop(timeout_ms)) is not None:
            self._take_chunk(chunk)

    def take_rest(self, token_ids: list[int], logprobs: list[Any], reason: str) -> None:
        """The response's own record of this row, for one whose channel never finished. A record that contradicts what
        was already delivered ends the row in error.
        """
        if self.is_done:
            return
        if token_ids[: self.num_tokens] != self._token_ids:
            self.fail("the runtime's response contradicts the tokens that it had streamed for this row")
            return
        if reason == _ERROR:
            self.fail("the runtime ended this row with an error of its own")
            return
        self._take(token_ids[self.num_tokens :], logprobs[self.num_tokens :], reason)

    def fail(self, message: str) -> None:
        if not self.is_done:
            self.is_done = True
            self._updates.append(
                RowUpdate(self.row_id, finish_reason=FinishReason.ERROR, error=message, is_verify=False)
            )

    def drop(self) -> None:
        """Stopped from outside: the runtime is told, nothing more is reported."""
        self._cancel()
        self.is_done = True
        self._updates.clear()

    def _take_chunk(self, chunk: Any) -> None:
        reason = chunk.reason.name if chunk.finished else None
        self._take(list(chunk.token_ids), list(chunk.logprobs), reason)

    def _take(self, token_ids: list[int], logprobs: list[Any], reason: str | None) -> None:
        if reason == _ERROR:
            self._channel_failed, reason = True, None
        num_kept, finish = self._own_end(token_ids)
        if self.request.sampling.top_logprobs is not None and len(logprobs) < num_kept:
            self._cancel()
            self.fail(f"the runtime returned {len(logprobs)} logprobs for {num_kept} tokens")
            return
        if finish is None and reason is not None:
            finish = _FINISH_REASONS.get(reason, FinishReason.ERROR)
        elif finish is not None and reason is None:
            self._cancel()
        told = None if finish is FinishReason.ERROR else finish
        self._tell(token_ids, logprobs, num_kept, told)
        if finish is FinishReason.ERROR:
            self.fail(f"the runtime ended this row ({reason})")
        self.is_done = finish is not None

    def _own_end(self, token_ids: list[int]) -> tuple[int, FinishReason | None]:
        """How many of these tokens come before this row's own end, and how it ended if it did."""
        room = self.request.max_new_tokens - self.num_tokens
        for index, token_id in enumerate(token_ids[:room]):
            if token_id in self.request.eos_token_ids:
                return index + 1, FinishReason.STOP
        if len(token_ids) >= room:
            return room, FinishReason.LENGTH
        return len(token_ids), None

    def _tell(self, token_ids: list[int], logprobs: list[Any], num_kept: int, finish: FinishReason | None) -> None:
        """Queue one update per round. Acceptance counts the round's work, tokens only what is kept of it."""
        kept = token_ids[:num_kept]
        entries = self._logprobs(kept, logprobs)
        rounds = list(_rounds(len(token_ids), self._num_drafts, has_first=self.num_tokens == 0))
        rounds = [r for r in rounds if r.start < num_kept] or [_Round(0, 0, is_verify=False)]
        if not kept and finish is None:
            return
        for number, part in enumerate(rounds, start=1):
            drafted = self._num_drafts if part.is_verify else 0
            accepted = part.stop - part.start - 1 if drafted else 0
            self.num_accepted += accepted
            self._updates.append(
                RowUpdate(
                    self.row_id,
                    token_ids=tuple(kept[part.start : part.stop]),
                    logprobs=tuple(entries[part.start : part.stop]),
                    finish_reason=finish if number == len(rounds) else None,
                    num_drafted=drafted,
                    num_accepted=accepted,
                    is_verify=part.is_verify,
                    drafting_off=self._drafting_off,
                )
            )
        self._token_ids += kept

    def _logprobs(self, kept: list[int], logprobs: list[Any]) -> list[TokenLogprobs]:
        top_logprobs = self.request.sampling.top_logprobs
        if top_logprobs is None:
            return []
        return [_token_logprobs(token, row, top_logprobs) for token, row in zip(kept, logprobs, strict=False)]

    def _cancel(self) -> None:
        if self._channel is not None:
            self._channel.cancel()


@dataclass(frozen=True, slots=True)
class _Round:
    """Tokens [start, stop) of a chunk. The prompt's own first token is no verify."""

    start: int
    stop: int
    is_verify: bool = True


def _rounds(num_tokens: int, num_drafts: int, *, has_first: bool) -> Iterator[_Round]:
    start = 0
    if has_first and num_tokens:
        yield _Round(0, 1, is_verify=False)
        start = 1
    while start < num_tokens:
        stop = min(start + num_drafts + 1, num_tokens)
        yield _Round(start, stop)
        start = stop


def _token_logprobs(token_id: int, entries: list[Any], top_logprobs: int) -> TokenLogprobs:
    """`entries` are the best tokens of one position, best first. The token itself is an argmax (sampled requests are
    refused logprobs), so where a tie keeps it out of the list its logprob is the first entry's.
    """
    own = next((entry.logprob for entry in entries if entry.token_id == token_id), entries[0].logprob)
    top = tuple((entry.token_id, entry.logprob) for entry in entries[:top_logprobs])
    return TokenLogprobs(own, top)
