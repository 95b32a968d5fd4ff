"""Acceptance of drafts: one rule for every temperature.

    positions   t        t+1      t+2      t+3        verified together: the last committed token, then the drafts
    drafts      d0       d1       d2                  the head's proposals for t, t+1, t+2
    own         x0       x1       x2       x3         what the row itself draws from the base model's scores

Walk from the left: draw x_i and emit it; while x_i equals d_i the scores after it are those of the real text, so go on;
at the first difference stop; if all agree, the last x is the bonus. Every emitted token is the row's own draw, so the
text is the same whatever was drafted, and an argmax draft is accepted with probability p(draft).

The walk also ends at an EOS id and at `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgellm_worker.engine.errors import RowError
from edgellm_worker.engine.runtime.executor import Int
from edgellm_worker.engine.runtime.rows import Row
from edgellm_worker.engine.runtime.sampling import RowSampler, draw_ahead
from edgellm_worker.engine.runtime.scores import Candidates, RoundScores, Scores


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verify gave one row.

    token_ids     the emitted tokens, at least one, already committed to the sampler
    num_accepted  how many of them were drafts: the length of the agreeing prefix. A draft behind an EOS or behind
                  max_tokens became no token and is not counted. While the row lives on, the engine folds
                  num_accepted + 1 verify rows into its state (the last committed token and the accepted drafts);
                  the last token is always new to the base model unless an accepted draft ended the row
    scores        what they were drawn from, for `RowSampler.logprobs`
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    scores: Candidates | Sequence[Scores] = ()


def accept_rows(rows: Sequence[Row], drafts: Int, scores: RoundScores) -> list[Accepted | RowError]:
    """One verify of all rows: drafts [B, K], scores of K + 1 positions. The tokens of all rows are drawn together where
    they can be, and one by one where a draw must wait for what was committed before it.
    """
    guesses: list[list[int]] = drafts.tolist()
    ahead: list[list[int] | None] = [None] * len(rows)
    if scores.candidates is not None:
        positions = [row.position + 1 for row in rows]
        ahead = draw_ahead([row.sampler for row in rows], positions, guesses, scores.candidates)
    outcomes: list[Accepted | RowError] = []
    for index, (row, drawn) in enumerate(zip(rows, ahead, strict=True)):
        own: Iterable[int] | None = drawn
        seen: Candidates | Sequence[Scores] = ()
        try:
            if own is None:
                seen = scores.row(index)
                own = row.sampler.draw_each(seen, row.position + 1)
            elif row.sampler.wants_logprobs and scores.candidates is not None:
                seen = scores.candidates.row(index)
            tokens, num_accepted = _walk(row.sampler, own, guesses[index], row.request.eos_token_ids, row.num_left)
            outcomes.append(Accepted(tokens, num_accepted, seen))
        except RowError as error:
            outcomes.append(error)
    return outcomes


def accept(
    sampler: RowSampler,
    scores: Sequence[Scores],
    drafts: Sequence[int],
    position: int,
    *,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> Accepted:
    """One row's verify: `scores[i]` is for absolute index `position + i`, one more than drafts. With no drafts this is
    the plain draw of one token.

    stop_ids    the row's EOS ids
    max_tokens  what the row may still emit, at least 1

    Raises `RowError` when scores are not numbers.
    """
    if len(scores) != len(drafts) + 1 or max_tokens < 1:
        raise ValueError(f"{len(scores)} scores for {len(drafts)} drafts, {max_tokens} tokens left")
    tokens, num_accepted = _walk(sampler, sampler.draw_each(scores, position), drafts, stop_ids, max_tokens)
    return Accepted(tokens, num_accepted, scores)


def _walk(
    sampler: RowSampler, own: Iterable[int], drafts: Sequence[int], stop_ids: frozenset[int], max_tokens: int
) -> tuple[tuple[int, ...], int]:
    """The emitted tokens and how many of them were drafts. `own` may draw each token as it is asked for."""
    tokens: list[int] = []
    num_accepted = 0
    for i, token_id in enumerate(own):
        if sampler.has_memory:
            sampler.commit(token_id)
        tokens.append(token_id)
        if i == len(drafts) or token_id != drafts[i]:
            break
        num_accepted += 1
        if token_id in stop_ids or len(tokens) == max_tokens:
            break
    return tuple(tokens), num_accepted
