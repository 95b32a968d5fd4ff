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

from edgellm_worker.engine.runtime.sampling import Draw, RowSampler, Scores


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


def accept(  # the engine's seam: five facts of one row and two limits
    sampler: RowSampler,
    scores: Sequence[Scores],
    drafts: Sequence[int],
    position: int,
    *,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> Accepted:
    """Walk the verify positions. `scores[i]` is for absolute index `position + i`; one more than there are drafts.

    With no drafts this is the plain draw of one token. `max_tokens` (>= 1) is what the row may still emit. Raises
    `RowError` when scores are not numbers.
    """
    if len(scores) != len(drafts) + 1 or max_tokens < 1:
        raise ValueError(f"{len(scores)} scores for {len(drafts)} drafts, {max_tokens} tokens left")
    together = sampler.draw_together(scores, position)
    draws: list[Draw] = []
    num_accepted = 0
    for i, score in enumerate(scores):
        draw = sampler.draw(score, position + i) if together is None else sampler.with_logprobs(together[i], score)
        sampler.commit(draw.token_id)
        draws.append(draw)
        if i == len(drafts) or draw.token_id != drafts[i]:
            break
        num_accepted += 1
        if draw.token_id in stop_ids or len(draws) == max_tokens:
            break
    return Accepted(tuple(draws), num_accepted)
