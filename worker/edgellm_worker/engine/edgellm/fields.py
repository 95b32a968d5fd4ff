"""The batch-wide fields of one native call.

Almost everything in the vendor's request holds for *all* its rows, and there are four different sets of defaults: the
class (temperature 0, top_k 0, top_p 0, length 0), its helper function (1.0, 50, 0.8, 256), its HTTP layer (0.7, 50,
0.9, 2048) and its Python layer. So nothing is left to a default: `apply` sets every field, and a field that this file
does not name fails a test against the recorded signatures. Two requests may share a call exactly if their
`BatchFields` are equal; what differs per row (seed value, logit bias, stop channel) is not in here.

Two traps of the runtime's sampler are answered here:
- `top_k` 0 and `top_p` 1 with a temperature within 1e-3 of 1 count as *greedy* there. A sampled request therefore
  always carries `top_p` below 1 - 1e-6: what it cuts is at most 2e-6 of the distribution's mass.
- linear MTP drafting is silently greedy. A sampled request carries `disable_spec_decode`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from edgellm_worker.engine.api import SamplingParams

TOP_P_SAMPLED_MAX: Final = 1.0 - 2e-6

# Fields whose values are enum members of the native module: the module's class of each.
_ENUM_FIELDS: Final = {
    "spec_proposal_sampling": "SpecProposalSampling",
    "context_cache_lookup_policy": "ContextCacheLookupPolicy",
    "context_cache_commit_policy": "ContextCacheCommitPolicy",
}
# Set by `apply` itself: they belong to one call, not to a kind of call.
PER_CALL_FIELDS: Final = frozenset(
    {"requests", "formatted_requests", "stream_channels", "max_generate_length", "tools", "tool_choice"}
)


@dataclass(frozen=True, slots=True)
class BatchFields:
    """One value per batch-wide field of `LLMGenerationRequest`, under its name; enum members by name.

    `has_row_seeds` is no field there, but rows that agree in all fields still may not mix seeded and unseeded.
    """

    temperature: float
    top_p: float
    top_k: int
    num_logprobs: int
    disable_spec_decode: bool
    has_row_seeds: bool
    sampling_seed: None = None
    spec_proposal_sampling: str = "GREEDY"
    lora_weights_name: str = ""
    save_system_prompt_kv_cache: bool = False
    apply_chat_template: bool = False
    add_generation_prompt: bool = False
    enable_thinking: bool = False
    reasoning_effort: str = ""
    parallel_tool_calls: bool = False
    skip_special_tokens: bool = False
    recurrent_capture_interval: int = 0
    context_cache_lookup_policy: str = "BYPASS"
    context_cache_commit_policy: str = "PREFILL_STATE_ONLY"
    context_cache_replay_tail_length: int = 0


def batch_fields(sampling: SamplingParams) -> BatchFields:
    """The kind of call that this request needs."""
    num_logprobs = 0 if sampling.top_logprobs is None else max(1, sampling.top_logprobs)
    if sampling.temperature == 0:
        return BatchFields(
            temperature=0.0,
            top_p=1.0,
            top_k=1,
            num_logprobs=num_logprobs,
            disable_spec_decode=False,
            has_row_seeds=False,
        )
    return BatchFields(
        temperature=sampling.temperature,
        top_p=min(sampling.top_p, TOP_P_SAMPLED_MAX),
        top_k=sampling.top_k,
        num_logprobs=num_logprobs,
        disable_spec_decode=True,
        has_row_seeds=True,
    )


def new_request(module: Any, fields: BatchFields, max_generate_length: int) -> Any:
    """A native request without rows, every batch-wide field set."""
    request = module.LLMGenerationRequest()
    values = asdict(fields)
    del values["has_row_seeds"]
    for name, value in values.items():
        enum = _ENUM_FIELDS.get(name)
        setattr(request, name, getattr(getattr(module, enum), value) if enum else value)
    no_tools = module.ToolChoice()
    no_tools.mode = module.ToolChoiceMode.NONE
    no_tools.function_name = ""
    request.tools = []
    request.tool_choice = no_tools
    request.formatted_requests = []
    request.max_generate_length = max_generate_length
    return request


def new_row(module: Any, text: str, sampling: SamplingParams, *, seeded: bool) -> Any:
    """One row: its prompt, rendered already, as a single message.

    The role must be one that the model's template knows, or the runtime drops the message with a log line: every
    template knows "user". Stop strings stay with the caller, who matches them on the text it decodes itself.
    """
    message = module.Message(role="user", contents=[module.MessageContent(type="text", content=text)])
    row = module.Request(messages=[message])
    row.image_buffers = []
    row.audio_buffers = []
    row.stop_strings = []
    row.logit_bias = dict(sampling.logit_bias)
    row.guided_decoding = None
    row.sampling_seed = sampling.seed if seeded else None
    return row
