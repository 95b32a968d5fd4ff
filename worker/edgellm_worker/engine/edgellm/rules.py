"""What a request may ask of the vendor's runtime, and which requests may share one native call.

Pure, so that a process which has no runtime at all can check and group jobs for the child that has one.

Lengths. The runtime clamps the new tokens of *every* row to  capacity - longest prompt - headroom  and fails the whole
call when one prompt is too long, and it pads every prompt of a call to the longest when it reads them. So:
- `EngineLimits.max_kv_cache_capacity` as shown to callers is the built capacity less `HEADROOM_SLACK`, which makes
  `EngineLimits.max_new_tokens` equal to  capacity - prompt - (drafts + 1),  the runtime's own clamp for one row;
- prompts share a call only within a bucket (sizes a factor of two apart), and only if a prompt of the bucket's full
  size would leave the row its tokens. A row too long for that shares with rows of its exact prompt length.

    bucket of 300 = (256, 512]                         capacity 1024, drafts 3
    300 + 400 new: 512 + 400 + 4 <= 1024  -> key (fields, "up to", 512)
    300 + 600 new: 512 + 600 + 4 >  1024  -> key (fields, "exactly", 300)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from edgellm_worker.engine.api import EngineLimits, GenerationRequest
from edgellm_worker.engine.edgellm.fields import BatchFields, batch_fields
from edgellm_worker.engine.edgellm.prompt import PromptText
from edgellm_worker.engine.errors import RequestError
from edgellm_worker.engine.runtime.sampling import check_params

HEADROOM_SLACK: Final = 2
SMALLEST_BUCKET: Final = 128
MAX_LOGIT_BIAS_TOKENS: Final = 1024
MAX_SEED: Final = (1 << 63) - 1

_UNSUPPORTED: Final = "unsupported_field"
_TOO_LONG: Final = "context_length_exceeded"
_INVALID: Final = "invalid_field"


@dataclass(frozen=True, slots=True)
class CompatKey:
    """Equal keys share a call. `prompt_class` is ("up to", bucket) or ("exactly", prompt length)."""

    fields: BatchFields
    prompt_class: tuple[str, int]
    length_class: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """`field` of the job is refused with `reason` when `applies`."""

    field: str
    reason: str
    applies: Callable[[GenerationRequest], bool]


_REFUSALS: Final = (
    Refusal("min_p", "this engine's runtime has no min_p", lambda r: r.sampling.min_p > 0),
    Refusal(
        "repetition_penalty", "this engine's runtime ignores penalties", lambda r: r.sampling.repetition_penalty != 1
    ),
    Refusal("frequency_penalty", "this engine's runtime has no penalties", lambda r: r.sampling.frequency_penalty != 0),
    Refusal("presence_penalty", "this engine's runtime has no penalties", lambda r: r.sampling.presence_penalty != 0),
    Refusal("response_format", "structured output is not wired to this engine", lambda r: r.grammar is not None),
    Refusal(
        "ignore_eos",
        "this engine's runtime always stops at the model's EOS tokens",
        lambda r: not r.eos_token_ids,
    ),
    Refusal(
        "logit_bias",
        f"this engine takes at most {MAX_LOGIT_BIAS_TOKENS} biased tokens",
        lambda r: len(r.sampling.logit_bias) > MAX_LOGIT_BIAS_TOKENS,
    ),
    Refusal(
        "logprobs",
        "this engine's runtime returns the best tokens only, so a sampled token may have no logprob; use temperature 0",
        lambda r: r.sampling.top_logprobs is not None and r.sampling.temperature > 0,
    ),
    Refusal(
        "logprobs",
        "this engine's runtime may count the bias in; use logprobs without logit_bias",
        lambda r: r.sampling.top_logprobs is not None and bool(r.sampling.logit_bias),
    ),
    Refusal("seed", f"must be from 0 to {MAX_SEED}", lambda r: not 0 <= r.sampling.seed <= MAX_SEED),
)


def prompt_bucket(num_prompt_tokens: int, max_input_len: int) -> int:
    """The size that this prompt is padded to at most."""
    bucket = SMALLEST_BUCKET
    while bucket < num_prompt_tokens:
        bucket *= 2
    return min(bucket, max_input_len)


def length_class(max_new_tokens: int) -> int:
    """Rows that join a running batch must ask for equal lengths there: the next power of two; each row is cut at its
    own limit anyway.
    """
    return 1 << max(0, max_new_tokens - 1).bit_length()


@dataclass(frozen=True, slots=True)
class EdgeLlmRules:
    """`in_flight` engines prefill rows one at a time, so prompts of all lengths mix, but lengths are in classes.
    Without `prompts`, ids that no text gives are found when the row is added, not here.
    """

    limits: EngineLimits
    in_flight: bool = False
    prompts: PromptText | None = None

    def validate(self, request: GenerationRequest) -> None:
        """Raise `RequestError` naming the field when this request can never run here."""
        for refusal in _REFUSALS:
            if refusal.applies(request):
                raise RequestError(refusal.field, refusal.reason, code=_UNSUPPORTED)
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError("prompt_token_ids", "is empty")
        if num_prompt > self.limits.max_input_len:
            message = f"{num_prompt} tokens, this engine takes {self.limits.max_input_len}"
            raise RequestError("prompt_token_ids", message, code=_TOO_LONG)
        most = self.limits.max_new_tokens(num_prompt)
        if not 1 <= request.max_new_tokens <= most:
            message = f"{request.max_new_tokens} is not within 1 to {most}, what this prompt leaves of the context"
            raise RequestError("max_tokens", message, code=_TOO_LONG if request.max_new_tokens > most else _INVALID)
        outside = next((i for i in request.prompt_token_ids if not 0 <= i < self.limits.vocab_size), None)
        if outside is not None:
            raise RequestError("prompt_token_ids", f"{outside} is outside the vocabulary of {self.limits.vocab_size}")
        check_params(request.sampling, self.limits.vocab_size)
        if self.prompts is not None:
            self.prompts.of(request.prompt_token_ids)

    def compat_key(self, request: GenerationRequest) -> Hashable:
        fields = batch_fields(request.sampling)
        if self.in_flight:
            return CompatKey(fields, ("up to", self.limits.max_input_len), length_class(request.max_new_tokens))
        num_prompt = len(request.prompt_token_ids)
        bucket = prompt_bucket(num_prompt, self.limits.max_input_len)
        if request.max_new_tokens <= self.limits.max_new_tokens(bucket):
            return CompatKey(fields, ("up to", bucket))
        return CompatKey(fields, ("exactly", num_prompt))


def drafting_off(request: GenerationRequest) -> str | None:
    """Why no row of this request is drafted although the engine drafts, or None when it is."""
    if request.sampling.temperature > 0:
        return "this engine drafts at temperature 0 only"
    return None
