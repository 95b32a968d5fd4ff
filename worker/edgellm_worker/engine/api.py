"""What every engine is, in standard-library types only.

An engine turns token sequences into generated tokens. It knows nothing of jobs, Redis, text or metrics.

    row    one sequence being generated; its id is chosen by the caller and is unique for the engine's lifetime
    slot   the place of a row in the batch, the engine's own business
    step   one draft-and-verify round of all active rows, or one prefill chunk between such rounds

`Engine` is synchronous and is driven by whoever owns it. `EngineHandle` lets it run freely beside an event loop: rows
go in, step reports come out. A handle in a thread and a handle around a child process look the same to the daemon.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class FinishReason(StrEnum):
    STOP = "stop"  # the last token is one of the request's EOS ids
    LENGTH = "length"  # max_new_tokens reached
    ERROR = "error"  # this row failed alone; `RowUpdate.error` says why


class Phase(StrEnum):
    """Where the time of a step goes (label of `step_duration_seconds`)."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Fully resolved: no field is unset here. Order of application: penalties, bias, temperature, top_k, top_p, min_p.

    `temperature` 0 is argmax, ties by lowest id. `top_k` 0 is off. `top_logprobs` None means no logprobs at all.
    `seed` is the row's own; the token at absolute position t depends on (seed, t) and the row's own distribution only.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`eos_token_ids` is empty for ignore_eos. `grammar` is a serialized structured-output constraint, or None."""

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    eos_token_ids: frozenset[int] = frozenset()
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine instance can take. `max_kv_cache_capacity` is tokens per row, prompt and output together."""

    max_batch_size: int
    max_input_len: int
    max_kv_cache_capacity: int
    max_verify_tree_size: int
    max_draft_tree_size: int
    num_speculative_tokens: int
    vocab_size: int

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """The most tokens a prompt of this length can get: a verify writes up to num_speculative_tokens past the end,
        so capacity >= prompt + new - 1 + num_speculative_tokens.
        """
        return self.max_kv_cache_capacity - num_prompt_tokens + 1 - self.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What callers must know of an engine's kind.

    in_flight            rows may join while others run; otherwise a batch is closed at its first step
    seeded               the same seed gives the same text in any batch
    drafts_when_sampled  rows with temperature > 0 are drafted too
    speculative_method   "mtp", or why nothing is drafted ("off: checkpoint has no MTP")
    """

    name: str
    in_flight: bool
    seeded: bool
    drafts_when_sampled: bool
    speculative_method: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs of the raw distribution; `top` holds (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What one step did for one row.

    token_ids      newly committed, in order; ends with the EOS id when finish_reason is STOP
    logprobs       one per token when the request asked for them, else empty
    num_drafted    drafts verified in this step; num_accepted of them became tokens (0 in a prefill step).
                   Both count engine work, also for tokens that a stop then cut.
    error          a message; finish_reason is then ERROR and the row is already gone
    drafting_off   why this row is not drafted by an engine that drafts, or None
    """

    row_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    is_verify: bool = True
    error: str | None = None
    drafting_off: str | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step. `phase_s` is seconds per phase; `num_speculative_tokens` the draft length used (0 when none)."""

    updates: tuple[RowUpdate, ...]
    num_rows: int
    phase_s: Mapping[Phase, float]
    num_speculative_tokens: int
    num_prefill_tokens: int
    kv_tokens_used: int
    memory_bytes: Mapping[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """A finished row (any finish_reason) is gone when `step` returns; `remove` is for rows stopped from outside."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def traits(self) -> EngineTraits: ...

    @property
    def num_rows(self) -> int: ...

    def compat_key(self, request: GenerationRequest) -> Hashable:
        """Requests with different keys never share a batch. The reference engine needs none: it returns ()."""

    def validate(self, request: GenerationRequest) -> None:
        """Raise `RequestError` naming the field when this request can never run here."""

    def add(self, row_id: int, request: GenerationRequest) -> None:
        """Takes effect at the next step. Raises `RequestError` as `validate`, `CapacityError` when no slot is free."""

    def remove(self, row_id: int) -> None:
        """Free the row's slot; an unknown or finished row is ignored (the two may cross)."""

    def step(self) -> StepReport:
        """Advance every row; raises `EngineError` when the engine itself, not a row, is broken."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The engine died or hung; these rows were lost with it. `hung` tells a watchdog kill from a death."""

    row_ids: tuple[int, ...]
    reason: str
    hung: bool = False


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine (re)started and takes rows."""

    memory_bytes: Mapping[str, int] = field(default_factory=dict)


EngineEvent = StepReport | EngineFailure | EngineReady


class EngineHandle(Protocol):
    """A free-running engine. `add` and `remove` return at once, may be called from the event loop only, and are applied
    at the next step boundary in order. A row that `add` could not place comes back as a RowUpdate with `error`.
    """

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def traits(self) -> EngineTraits: ...

    @property
    def is_ready(self) -> bool: ...

    def compat_key(self, request: GenerationRequest) -> Hashable: ...

    def validate(self, request: GenerationRequest) -> None: ...

    def add(self, row_id: int, request: GenerationRequest) -> None: ...

    def remove(self, row_id: int) -> None: ...

    async def next_event(self) -> EngineEvent: ...

    async def close(self) -> None: ...
