"""An `Engine` that takes known times: a round costs `ROUND_S + DRAFT_S` per draft on a clock of its own, and all drafts
but one are right. The tokens of a row are its prompt, repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from edgellm_worker.engine.api import (
    EngineLimits,
    EngineTraits,
    FinishReason,
    GenerationRequest,
    Phase,
    RowUpdate,
    StepReport,
)
from edgellm_worker.engine.errors import RequestError
from edgellm_worker.engine.runtime.speculative_config import SpeculativeConfig

PREFILL_S, ROUND_S, DRAFT_S = 0.5, 1.0, 0.125
LONGEST_PROMPT = 16


@dataclass
class Log:
    """What the engines of one test did. `clock` is read by the sweep."""

    now: float = 0.0
    opened: list[SpeculativeConfig] = field(default_factory=list)
    closed: int = 0
    row_counts: list[int] = field(default_factory=list)
    row_ids: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


@dataclass
class CountingEngine:
    log: Log
    num_drafts: int
    in_flight: bool = True
    method: str = "mtp"
    key_of: Callable[[GenerationRequest], Hashable] = lambda _request: ()
    error: str | None = None

    def __post_init__(self) -> None:
        self.traits = EngineTraits("counting", self.in_flight, True, True, self.method)
        self.limits = EngineLimits(8, LONGEST_PROMPT, 256, self.num_drafts + 1, self.num_drafts, self.num_drafts, 8192)
        self._rows: dict[int, tuple[GenerationRequest, list[int]]] = {}

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self.key_of(request)

    def validate(self, request: GenerationRequest) -> None:
        if len(request.prompt_token_ids) > LONGEST_PROMPT:
            raise RequestError("prompt", "too long")

    def add(self, row_id: int, request: GenerationRequest) -> None:
        assert row_id not in self.log.row_ids or row_id == -1, "a row id came twice"
        self.log.row_ids.append(row_id)
        self._rows[row_id] = (request, [])

    def remove(self, row_id: int) -> None:
        self._rows.pop(row_id, None)

    def close(self) -> None:
        self.log.closed += 1
        self.log.row_ids.clear()

    def step(self) -> StepReport:
        """New rows read their prompts and get a token, else every row gets 1 + drafts - 1 of them."""
        self.log.row_counts.append(len(self._rows))
        fresh = [row_id for row_id, (_, made) in self._rows.items() if not made]
        right = max(0, self.num_drafts - 1)
        self.log.now += PREFILL_S if fresh else ROUND_S + DRAFT_S * self.num_drafts
        updates = [self._grow(row_id, 1 if fresh else 1 + right) for row_id in fresh or tuple(self._rows)]
        phase = Phase.PREFILL if fresh else Phase.VERIFY
        return StepReport(tuple(updates), len(self._rows), {phase: 0.0}, self.num_drafts, 0, 0)

    def _grow(self, row_id: int, count: int) -> RowUpdate:
        request, made = self._rows[row_id]
        is_verify = bool(made)
        count = min(count, request.max_new_tokens - len(made))
        prompt = request.prompt_token_ids
        tokens = tuple(prompt[(len(made) + i) % len(prompt)] for i in range(count))
        made += tokens
        is_full = len(made) == request.max_new_tokens
        if is_full:
            del self._rows[row_id]
        drafted = self.num_drafts if is_verify else 0
        accepted = max(0, drafted - 1)
        end = FinishReason.LENGTH if is_full else None
        return RowUpdate(row_id, tokens, (), end, drafted, accepted, is_verify, self.error if row_id >= 0 else None)
