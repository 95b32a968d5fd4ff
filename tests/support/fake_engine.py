"""An engine whose every step is the test's, or that answers at once: a full `EngineHandle`.

The text of a row is its own prompt, repeated: a swapped row shows in the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from edgellm_worker.engine.api import (
    EngineEvent,
    EngineFailure,
    EngineLimits,
    EngineReady,
    EngineTraits,
    FinishReason,
    GenerationRequest,
    Phase,
    RowUpdate,
    StepReport,
    TokenLogprobs,
)
from edgellm_worker.engine.errors import RequestError

LIMITS = EngineLimits(
    max_batch_size=4,
    max_input_len=64,
    max_kv_cache_capacity=128,
    max_verify_tree_size=4,
    max_draft_tree_size=3,
    num_speculative_tokens=3,
    vocab_size=8192,
)
TRAITS = EngineTraits("fake", in_flight=True, seeded=True, drafts_when_sampled=True, speculative_method="mtp")


@dataclass(slots=True)
class FakeRow:
    request: GenerationRequest
    num_made: int = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        prompt = self.request.prompt_token_ids
        count = min(count, self.request.max_new_tokens - self.num_made)
        made = tuple(prompt[(self.num_made + i) % len(prompt)] for i in range(count))
        self.num_made += count
        return made

    @property
    def is_full(self) -> bool:
        return self.num_made >= self.request.max_new_tokens


class FakeEngine:
    """`at_once=True`: a row is complete in the step after its `add`. Else `step(n)` makes n tokens for every row.

    `key_of` gives compatibility keys; `refuse` is what `validate` raises for a request.
    """

    def __init__(
        self,
        limits: EngineLimits = LIMITS,
        traits: EngineTraits = TRAITS,
        *,
        at_once: bool = False,
        key_of: Callable[[GenerationRequest], Hashable] = lambda _request: (),
        refuse: Callable[[GenerationRequest], RequestError | None] = lambda _request: None,
    ) -> None:
        self._limits = limits
        self._traits = traits
        self._at_once = at_once
        self._key_of = key_of
        self._refuse = refuse
        self._events: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self.rows: dict[int, FakeRow] = {}
        self.added: list[int] = []
        self.max_rows = 0
        self.is_ready = True

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def traits(self) -> EngineTraits:
        return self._traits

    def compat_key(self, request: GenerationRequest) -> Hashable:
        return self._key_of(request)

    def validate(self, request: GenerationRequest) -> None:
        error = self._refuse(request)
        if error is not None:
            raise error

    def add(self, row_id: int, request: GenerationRequest) -> None:
        if len(self.rows) >= self._limits.max_batch_size:
            raise AssertionError("more rows than slots")
        self.rows[row_id] = FakeRow(request)
        self.added.append(row_id)
        self.max_rows = max(self.max_rows, len(self.rows))
        if self._at_once and len(self.rows) == 1:  # those added in the same turn are in its step
            asyncio.get_running_loop().call_soon(self._complete)

    def remove(self, row_id: int) -> None:
        self.rows.pop(row_id, None)

    async def next_event(self) -> EngineEvent:
        return await self._events.get()

    async def close(self) -> None:
        self.rows.clear()

    def step(self, num_tokens: int = 1, *, num_accepted: int | None = None) -> None:
        """Every row gets `num_tokens`; a full row ends. Drafts: as many accepted as tokens beyond the first."""
        if not self.rows:
            return
        accepted = max(0, num_tokens - 1) if num_accepted is None else num_accepted
        accepted = min(accepted, self._limits.num_speculative_tokens)
        updates, num_rows = [], len(self.rows)
        for row_id, row in tuple(self.rows.items()):
            tokens = row.tokens(num_tokens)
            wanted = row.request.sampling.top_logprobs is not None
            updates.append(
                RowUpdate(
                    row_id,
                    tokens,
                    tuple(TokenLogprobs(-0.5, ((token, -0.5),)) for token in tokens) if wanted else (),
                    FinishReason.LENGTH if row.is_full else None,
                    num_drafted=self._limits.num_speculative_tokens,
                    num_accepted=accepted,
                )
            )
            if row.is_full:
                del self.rows[row_id]
        self._report(tuple(updates), num_rows)

    def _complete(self) -> None:
        self.step(max((row.request.max_new_tokens for row in self.rows.values()), default=0))

    def finish_row(self, row_id: int, reason: FinishReason, error: str | None = None) -> None:
        """End one row from inside the engine."""
        row = self.rows.pop(row_id)
        del row
        self._report((RowUpdate(row_id, finish_reason=reason, error=error),), len(self.rows) + 1)

    def fail(self, *, hung: bool = False) -> None:
        """The engine dies with its rows and is not ready."""
        lost = tuple(self.rows)
        self.rows.clear()
        self.is_ready = False
        self._events.put_nowait(EngineFailure(lost, "killed by the test", hung))

    def recover(self) -> None:
        self.is_ready = True
        self._events.put_nowait(EngineReady({"weights": 1}))

    def _report(self, updates: tuple[RowUpdate, ...], num_rows: int) -> None:
        phases = {Phase.DRAFT: 0.001, Phase.VERIFY: 0.002, Phase.SAMPLE: 0.0005}
        self._events.put_nowait(StepReport(updates, num_rows, phases, 3, 0, num_rows))
