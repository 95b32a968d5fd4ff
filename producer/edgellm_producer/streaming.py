"""Deltas of several attempts into one text that a reader can print.

A job that is tried again streams from its start. With a seed the new attempt says the same, so what was yielded already
is skipped; where it says something else, the reader is told with `Restarted` and gets the new attempt whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm_producer.wire import Delta, Reply, TokenLogprob


@dataclass(frozen=True, slots=True)
class Restarted:
    """Forget what was yielded: attempt `attempt` begins anew. `text` is empty, so that printing it prints nothing."""

    attempt: int
    text: str = ""


@dataclass(slots=True)
class _Attempt:
    number: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class DeltaMerger:
    def __init__(self) -> None:
        self._current = _Attempt(0)
        self._yielded = _Attempt(0)

    def add(self, delta: Delta) -> list[Delta | Restarted]:
        """What the reader sees of this delta: nothing when it repeats what was seen."""
        if delta.attempt < self._current.number:
            return []
        if delta.attempt > self._current.number:
            self._current = _Attempt(delta.attempt)
        if delta.offset_tokens < len(self._current.token_ids):
            return []  # sent twice
        self._current.text += delta.text
        self._current.token_ids += delta.token_ids
        self._current.logprobs += delta.logprobs or []
        return self._advance(has_logprobs=delta.logprobs is not None)

    def end(self, reply: Reply) -> list[Delta | Restarted]:
        """What the answer holds beyond the deltas: all of it for a job that did not stream."""
        self._current = _Attempt(
            max(reply.attempt, self._current.number), reply.text, list(reply.token_ids), list(reply.logprobs or [])
        )
        return self._advance(has_logprobs=reply.logprobs is not None)

    def _advance(self, *, has_logprobs: bool) -> list[Delta | Restarted]:
        new, old = self._current, self._yielded
        if old.text.startswith(new.text) and old.token_ids[: len(new.token_ids)] == new.token_ids:
            return []
        events: list[Delta | Restarted] = []
        if not (new.text.startswith(old.text) and new.token_ids[: len(old.token_ids)] == old.token_ids):
            events.append(Restarted(new.number))
            old = _Attempt(new.number)
        events.append(
            Delta(
                attempt=new.number,
                offset_tokens=len(old.token_ids),
                text=new.text[len(old.text) :],
                token_ids=new.token_ids[len(old.token_ids) :],
                logprobs=new.logprobs[len(old.logprobs) :] if has_logprobs else None,
            )
        )
        self._yielded = _Attempt(new.number, new.text, list(new.token_ids), list(new.logprobs))
        return events
