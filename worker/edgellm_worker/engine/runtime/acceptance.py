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

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_worker.engine.errors import RowError
from edgellm_worker.engine.runtime.sampling import Draw, RowSampler, Scores, draw_ahead


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verify gave one row.

    draws         the emitted tokens, at least one, already committed to the sampler
    num_accepted  how many of them were drafts: the length of the agreeing prefix. A draft behind an EOS or behind
                  max_tokens became no token and is not counted. While the row lives on, the engine folds
                  num_accepted + 1 verify rows into its state (the last committed token and the accepted drafts);
                  the last draw is always new to the base model unless an accepted draft ended the row
    """

    draws: tuple[Draw, ...]
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verify pass gave one row: `scores[i]` is for absolute index `position + i`, one more than drafts.

    stop_ids    the row's EOS ids
    max_tokens  what the row may still emit, at least 1
    """

    sampler: RowSampler
    scores: Sequence[Scores]
    drafts: Sequence[int]
    position: int
    stop_ids: frozenset[int]
    max_tokens: int


def accept_rows(rows: Sequence[Verified]) -> list[Accepted | RowError]:
    """`accept` for every row of a step, with the draws of all rows made together where they can be."""
    ahead = draw_ahead([(row.sampler, row.scores, row.position) for row in rows])
    outcomes: list[Accepted | RowError] = []
    for row, drawn in zip(rows, ahead, strict=True):
        try:
            outcomes.append(_walk(row, drawn))
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
    """Walk one row's verify positions. With no drafts this is the plain draw of one token.

    Raises `RowError` when scores are not numbers.
    """
    return _walk(Verified(sampler, scores, drafts, position, stop_ids, max_tokens), None)


def _walk(row: Verified, drawn: Sequence[int] | None) -> Accepted:
    """`drawn`: the row's own tokens, where they are known already."""
    sampler, drafts = row.sampler, row.drafts
    if len(row.scores) != len(drafts) + 1 or row.max_tokens < 1:
        raise ValueError(f"{len(row.scores)} scores for {len(drafts)} drafts, {row.max_tokens} tokens left")
    draws: list[Draw] = []
    num_accepted = 0
    for i, score in enumerate(row.scores):
        draw = sampler.draw(score, row.position + i) if drawn is None else sampler.with_logprobs(drawn[i], score)
        sampler.commit(draw.token_id)
        draws.append(draw)
        if i == len(drafts) or draw.token_id != drafts[i]:
            break
        num_accepted += 1
        if draw.token_id in row.stop_ids or len(draws) == row.max_tokens:
            break
    return Accepted(tuple(draws), num_accepted)
