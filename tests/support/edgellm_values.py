"""The value classes of the vendor's native module, as recorded: unknown attributes raise, lists are handed out as
copies, channels must be fresh. `tests/unit/test_edgellm_fake.py` compares every class with the recorded signatures.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar


class FinishReason(enum.IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4
    STOP_WORDS = 5


class SpecProposalSampling(enum.IntEnum):
    AUTO = 0
    GREEDY = 1
    PROBABILISTIC = 2


class ContextCacheLookupPolicy(enum.IntEnum):
    USE_CACHE = 0
    BYPASS = 1


class ContextCacheCommitPolicy(enum.IntEnum):
    INCLUDING_GENERATED_TOKENS = 0
    PREFILL_STATE_ONLY = 1


class ToolChoiceMode(enum.IntEnum):
    NONE = 0
    AUTO = 1
    REQUIRED = 2
    FUNCTION = 3


class ShutdownMode(enum.IntEnum):
    DRAIN = 0
    CANCEL = 1


class SubmitError(Exception):
    pass


class _Value:
    """Attributes are those of `FIELDS` only; lists go in and out as copies, as through the binding."""

    FIELDS: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", {name: make() for name, make in self.FIELDS.items()})
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = values[name]
        return list(value) if isinstance(value, list) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        known = self.FIELDS[name]()
        accepted = (int, float) if isinstance(known, float) else type(known)
        if known is not None and not isinstance(value, accepted):
            raise TypeError(f"{type(self).__name__}.{name}: incompatible type {type(value).__name__}")
        self._values[name] = list(value) if isinstance(value, list) else value


class MessageContent(_Value):
    FIELDS: ClassVar = {"type": str, "content": str}

    def __init__(self, type: str = "", content: str = "") -> None:  # noqa: A002 - the vendor's name
        super().__init__(type=type, content=content)


class Message(_Value):
    FIELDS: ClassVar = {
        "role": str,
        "contents": list,
        "reasoning_content": str,
        "has_reasoning_content": bool,
        "tool_calls": list,
        "has_tool_calls": bool,
        "tool_call_id": str,
        "name": str,
        "has_content": lambda: True,
        "content_is_array": bool,
        "content_is_null": bool,
    }

    def __init__(self, role: str = "", contents: list[MessageContent] | None = None) -> None:
        super().__init__(role=role, contents=contents or [])


class Request(_Value):
    FIELDS: ClassVar = {
        "messages": list,
        "image_buffers": list,
        "audio_buffers": list,
        "stop_strings": list,
        "logit_bias": dict,
        "guided_decoding": lambda: None,
        "sampling_seed": lambda: None,
    }

    def __init__(self, messages: list[Message] | None = None) -> None:
        super().__init__(messages=messages or [])


class ToolChoice(_Value):
    FIELDS: ClassVar = {"mode": lambda: ToolChoiceMode.AUTO, "function_name": str}

    def __init__(self) -> None:
        super().__init__()


class ContextCacheConfig(_Value):
    FIELDS: ClassVar = {
        "enabled": bool,
        "max_records": lambda: 1024,
        "recurrent_snapshot_pool_bytes": int,
        "partial_kv_snapshot_pool_bytes": int,
    }

    def __init__(self) -> None:
        super().__init__()


class LLMGenerationRequest(_Value):
    FIELDS: ClassVar = {
        "requests": list,
        "formatted_requests": list,
        "temperature": float,
        "top_p": float,
        "top_k": int,
        "sampling_seed": lambda: None,
        "spec_proposal_sampling": lambda: SpecProposalSampling.AUTO,
        "max_generate_length": int,
        "lora_weights_name": str,
        "save_system_prompt_kv_cache": bool,
        "apply_chat_template": lambda: True,
        "add_generation_prompt": lambda: True,
        "enable_thinking": bool,
        "reasoning_effort": str,
        "tools": list,
        "tool_choice": ToolChoice,
        "parallel_tool_calls": lambda: True,
        "disable_spec_decode": bool,
        "skip_special_tokens": lambda: True,
        "recurrent_capture_interval": int,
        "stream_channels": list,
        "num_logprobs": int,
        "context_cache_lookup_policy": lambda: ContextCacheLookupPolicy.USE_CACHE,
        "context_cache_commit_policy": lambda: ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS,
        "context_cache_replay_tail_length": int,
    }

    def __init__(self) -> None:
        super().__init__()


@dataclass(frozen=True)
class LogprobEntry:
    token_id: int
    logprob: float
    piece: bytes = b""


@dataclass(frozen=True)
class StreamChunk:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt_token_count: int = -1
    finished: bool = False
    reason: FinishReason = FinishReason.NOT_FINISHED
    logprobs: list[list[LogprobEntry]] = field(default_factory=list)


@dataclass
class LLMGenerationResponse:
    output_ids: list[list[int]] = field(default_factory=list)
    output_texts: list[str] = field(default_factory=list)
    logprobs: list[list[list[LogprobEntry]]] = field(default_factory=list)
    finish_reasons: list[FinishReason] = field(default_factory=list)
    prompt_token_counts: list[int] = field(default_factory=list)


@dataclass
class SpecDecodeGenerationMetrics:
    total_iterations: int = 0
    total_generated_tokens: int = 0
    total_accepted_draft_tokens: int = 0
    total_proposed_draft_tokens: int = 0

    def get_total_runs(self) -> int:
        return 0


class StreamChannel:
    """Made by `create` only. `push` and `finish` are the runtime's side, which the binding hides."""

    _token = object()

    def __init__(self, token: object = None) -> None:
        if token is not StreamChannel._token:
            raise TypeError("StreamChannel: No constructor defined!")
        self.attached = False
        self._pending: deque[StreamChunk] = deque()
        self._condition = threading.Condition()
        self._reason = FinishReason.NOT_FINISHED
        self._is_cancelled = False
        self._interval = 1
        self._skips_special = True

    @staticmethod
    def create() -> StreamChannel:
        return StreamChannel(StreamChannel._token)

    def try_pop(self) -> StreamChunk | None:
        with self._condition:
            return self._pending.popleft() if self._pending else None

    def wait_pop(self, timeout_ms: int) -> StreamChunk | None:
        with self._condition:
            self._condition.wait_for(
                lambda: bool(self._pending) or self._reason != 0 or self._is_cancelled, timeout_ms / 1000
            )
            return self._pending.popleft() if self._pending else None

    def is_finished(self) -> bool:
        return self._reason != FinishReason.NOT_FINISHED

    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def get_reason(self) -> FinishReason:
        return self._reason

    def cancel(self) -> None:
        with self._condition:
            self._is_cancelled = True
            self._condition.notify_all()

    def get_stream_interval(self) -> int:
        return self._interval

    def set_stream_interval(self, n: int) -> None:
        self._interval = n

    def get_skip_special_tokens(self) -> bool:
        return self._skips_special

    def set_skip_special_tokens(self, skip: bool) -> None:
        self._skips_special = skip

    def push(self, chunk: StreamChunk) -> None:
        with self._condition:
            self._pending.append(chunk)
            self._condition.notify_all()

    def finish(self, reason: FinishReason) -> None:
        with self._condition:
            if self._reason == FinishReason.NOT_FINISHED:
                self._reason = reason
            self._condition.notify_all()


VALUE_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        FinishReason,
        SpecProposalSampling,
        ContextCacheLookupPolicy,
        ContextCacheCommitPolicy,
        ToolChoiceMode,
        ShutdownMode,
        MessageContent,
        Message,
        Request,
        ToolChoice,
        ContextCacheConfig,
        LLMGenerationRequest,
    )
}
