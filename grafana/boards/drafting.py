"""Does drafting earn its keep?"""

from __future__ import annotations

from typing import Final

from grafana.panel import Board, Unit
from grafana.promql import gauge, rate, ratio
from grafana.shapes import (
    ACCEPTANCE_LENGTH,
    ACCEPTED,
    DRAFT_STEPS,
    DRAFT_TIME,
    DRAFTED,
    IDLE,
    NO_DRAFTS,
    STEP_SECONDS,
    TOKENS,
    time,
)

BOARD: Final = Board(
    "edgellm-drafting",
    "edgellm / Drafting",
    "Does drafting earn its keep?",
    (
        time(
            "Acceptance",
            {"accepted / drafted": ratio(ACCEPTED, DRAFTED)},
            "Over all drafted tokens.",
            unit=Unit.RATIO,
            max_value=1,
            when_empty=NO_DRAFTS,
        ),
        time(
            "Acceptance by position",
            {
                "{{position}}": ratio(
                    rate("spec_decode_num_accepted_tokens_per_pos_total", by="position"), f"scalar({DRAFT_STEPS})"
                )
            },
            "Share of drafting steps in which this draft and all before it were accepted.",
            unit=Unit.RATIO,
            max_value=1,
            when_empty=NO_DRAFTS,
        ),
        time(
            "Mean acceptance length",
            {"tokens per step and row": ACCEPTANCE_LENGTH},
            "1 + accepted drafts per drafting step: tokens for one run of the base model.",
            when_empty=NO_DRAFTS,
        ),
        time(
            "Draft length in use",
            {"{{instance}}": gauge("spec_decode_num_speculative_tokens", by="instance", agg="max")},
            "Drafts per step now; moves when the length adapts to the batch.",
        ),
        time(
            "Share of tokens that came from drafts",
            {"from drafts": ratio(ACCEPTED, TOKENS)},
            "Accepted drafts over generated tokens. Drafts past a stop count as work, so it can pass 1 for moments.",
            unit=Unit.RATIO,
            when_empty=IDLE,
        ),
        time(
            "Drafted and accepted",
            {"drafted": DRAFTED, "accepted": ACCEPTED},
            "Tokens per second; the gap is work thrown away.",
            unit=Unit.PER_SECOND,
        ),
        time(
            "Share of step time spent on drafting",
            {"draft phase": ratio(DRAFT_TIME, STEP_SECONDS)},
            "What drafting costs.",
            unit=Unit.RATIO,
            max_value=1,
            when_empty=IDLE,
        ),
        time(
            "Net gain of drafting (estimate)",
            {"times faster": f"({ACCEPTANCE_LENGTH}) * (1 - {ratio(DRAFT_TIME, STEP_SECONDS)})"},
            "Acceptance length times the share of time not spent drafting. Below 1, drafting costs more than it gives. "
            "It takes a verify to cost as much as a plain step, so it flatters large batches.",
            when_empty=NO_DRAFTS,
        ),
    ),
)
