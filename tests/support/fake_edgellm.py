"""A stand-in for the vendor's native module: a runtime that says what a test tells it to.

Its value classes are those of `edgellm_values`, and `tests/unit/test_edgellm_fake.py` compares every class here with
the recorded signatures, so this file cannot drift from them. Nothing here computes: a row's tokens are the rounds that
its `Script` lists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support.edgellm_values import (
    VALUE_CLASSES,
    FinishReason,
    LLMGenerationRequest,
    LLMGenerationResponse,
    LogprobEntry,
    ShutdownMode,
    SpecDecodeGenerationMetrics,
    StreamChannel,
    StreamChunk,
    SubmitError,
)


@dataclass
class Script:
    """What the runtime does with one prompt text.

    rounds     the tokens of each round, the first being the prompt's own token; the last round repeats without end
    eos        the runtime's own EOS ids
    error      raise RuntimeError(error) instead, for the whole call
    num_prompt what `count_prompt_tokens` says, instead of `count_tokens(text)`
    held       rounds whose chunk is held back and comes with the next one
    """

    rounds: list[list[int]]
    eos: frozenset[int] = frozenset({2})
    error: str | None = None
    num_prompt: int | None = None
    held: frozenset[int] = frozenset()


@dataclass
class Behaviour:
    """Shared by every object of one fake module: scripts in, records out. `ends` has how each row of a call ended there."""

    script_of: Callable[[str], Script]
    count_tokens: Callable[[str], int] = len
    gate: threading.Event = field(default_factory=threading.Event)
    num_drafts: int = 3
    scramble_response: bool = False
    silent_channels: bool = False
    drop_response_rows: int = 0
    before_round: Callable[[int], None] = lambda number: None
    calls: list[dict[str, Any]] = field(default_factory=list)
    runtimes: list[Any] = field(default_factory=list)
    ends: list[list[tuple[FinishReason, int]]] = field(default_factory=list)
    profiling: list[bool] = field(default_factory=list)
    metrics: SpecDecodeGenerationMetrics = field(default_factory=SpecDecodeGenerationMetrics)

    def __post_init__(self) -> None:
        self.gate.set()


def text_of(row: Any) -> str:
    """The prompt of a native row; the contract of raw prompts: one message, of a role every template knows."""
    (message,) = row.messages
    assert message.role == "user"
    (content,) = message.contents
    assert content.type == "text"
    return str(content.content)


@dataclass
class _Running:
    script: Script
    channel: Any
    limit: int
    number: int = 0
    unsent: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.NOT_FINISHED

    def advance(self, num_logprobs: int, *, silent: bool) -> int:
        """One round; returns how many tokens it committed."""
        if self.channel is not None and self.channel.is_cancelled():
            self.reason = FinishReason.CANCELLED
            fresh: list[int] = []
        else:
            fresh = self._fresh()
        self.token_ids += fresh
        self.unsent += fresh
        is_held = self.number in self.script.held and self.reason == FinishReason.NOT_FINISHED
        self.number += 1
        if self.channel is not None and not silent and not is_held:
            logprobs = [[LogprobEntry(t, -0.5), LogprobEntry(t + 1, -1.5)][:num_logprobs] for t in self.unsent]
            finished = self.reason != FinishReason.NOT_FINISHED
            self.channel.push(
                StreamChunk(
                    list(self.unsent),
                    finished=finished,
                    reason=self.reason,
                    logprobs=logprobs if num_logprobs else [],
                )
            )
            self.unsent = []
            if finished:
                self.channel.finish(self.reason)
        return len(fresh)

    def _fresh(self) -> list[int]:
        tokens = self.script.rounds[min(self.number, len(self.script.rounds) - 1)]
        fresh: list[int] = []
        for token in tokens:
            fresh.append(token)
            if token in self.script.eos:
                self.reason = FinishReason.END_ID
                break
            if len(self.token_ids) + len(fresh) >= self.limit:
                self.reason = FinishReason.LENGTH
                break
        return fresh


class _Execution:
    """What both native engines do with a request: one round after another for all its rows."""

    def __init__(self, behaviour: Behaviour, request: Any) -> None:
        self._behaviour = behaviour
        self._request = request
        texts = [text_of(row) for row in request.requests]
        channels = list(request.stream_channels) or [None] * len(texts)
        assert len(channels) == len(texts), "streamChannels size must equal requests size"
        for channel in channels:
            assert channel is None or not (channel.attached or channel.is_finished()), "channel is not fresh"
            if channel is not None:
                channel.attached = True
        self.rows = [
            _Running(behaviour.script_of(text), channel, request.max_generate_length)
            for text, channel in zip(texts, channels, strict=True)
        ]

    def run(self) -> LLMGenerationResponse:
        try:
            self._behaviour.gate.wait()
            self._raise_scripted()
            number = 0
            while alive := [row for row in self.rows if row.reason == FinishReason.NOT_FINISHED]:
                self._behaviour.before_round(number)
                self._round(alive, is_verify=number > 0)
                number += 1
        except BaseException:
            for row in self.rows:
                if row.channel is not None:
                    row.channel.finish(FinishReason.ERROR)
            raise
        return self._response()

    def _raise_scripted(self) -> None:
        for row in self.rows:
            if row.script.error is not None:
                raise RuntimeError(row.script.error)

    def _round(self, alive: list[_Running], *, is_verify: bool) -> None:
        metrics = self._behaviour.metrics
        drafted = is_verify and not self._request.disable_spec_decode
        for row in alive:
            num_fresh = row.advance(self._request.num_logprobs, silent=self._behaviour.silent_channels)
            if drafted and num_fresh:
                metrics.total_generated_tokens += num_fresh
                metrics.total_accepted_draft_tokens += num_fresh - 1
                metrics.total_proposed_draft_tokens += self._behaviour.num_drafts
        metrics.total_iterations += drafted

    def _response(self) -> LLMGenerationResponse:
        self._behaviour.ends.append([(row.reason, len(row.token_ids)) for row in self.rows])
        rows = self.rows[self._behaviour.drop_response_rows :]
        if self._behaviour.scramble_response:
            rows = rows[::-1]
        return LLMGenerationResponse(
            output_ids=[row.token_ids for row in rows],
            output_texts=["" for _ in rows],
            finish_reasons=[row.reason for row in rows],
            prompt_token_counts=[0 for _ in rows],
        )


def _record(request: Any) -> dict[str, Any]:
    names = LLMGenerationRequest.FIELDS
    record = {name: getattr(request, name) for name in names if name not in {"requests", "stream_channels"}}
    record["texts"] = [text_of(row) for row in request.requests]
    record["seeds"] = [row.sampling_seed for row in request.requests]
    record["biases"] = [dict(row.logit_bias) for row in request.requests]
    record["stop_strings"] = [list(row.stop_strings) for row in request.requests]
    record["num_channels"] = len(request.stream_channels)
    return record


def _counts(behaviour: Behaviour, request: Any) -> list[int]:
    counts = []
    for row in request.requests:
        text = text_of(row)
        num_prompt = behaviour.script_of(text).num_prompt
        counts.append(behaviour.count_tokens(text) if num_prompt is None else num_prompt)
    return counts


class LLMRuntime:
    behaviour: Behaviour

    def __init__(  # both recorded overloads; which one is meant is told by the fourth argument's type
        self,
        engine_dir: str,
        multimodal_engine_dir: str = "",
        lora_weights_map: dict[str, str] | None = None,
        *args: Any,
    ) -> None:
        self.args = (engine_dir, multimodal_engine_dir, lora_weights_map, *args)
        self._has_draft = bool(args) and isinstance(args[0], int)
        self._is_busy = False
        self.behaviour.runtimes.append(self)

    __init__.__doc__ = (
        "__init__(self: LLMRuntime, engine_dir: str, multimodal_engine_dir: str, lora_weights_map: Mapping, "
        "draft_top_k: int, draft_step: int, verify_tree_size: int, checkpoint_dir: str, draft_checkpoint_dir: str, "
        "context_cache_config: ContextCacheConfig, dflash_block_size: int)"
    )

    def handle_request(self, request: Any) -> LLMGenerationResponse:
        if self._is_busy:
            raise RuntimeError("Overlapping requests on one runtime are not supported.")
        self._is_busy = True
        try:
            self.behaviour.calls.append(_record(request))
            return _Execution(self.behaviour, request).run()
        finally:
            self._is_busy = False

    def count_prompt_tokens(self, request: Any) -> list[int]:
        return _counts(self.behaviour, request)

    def capture_decoding_cuda_graph(self) -> bool:
        return True

    def has_draft_model(self) -> bool:
        return self._has_draft

    def get_spec_decode_generation_metrics(self) -> SpecDecodeGenerationMetrics:
        return self.behaviour.metrics


class RequestHandle:
    """Runs its request at once, in a thread: this fake has no scheduler."""

    def __init__(self, behaviour: Behaviour, number: int, request: Any) -> None:
        self._number = number
        self._channel = request.stream_channels[0]
        self._execution = _Execution(behaviour, request)
        self._response: LLMGenerationResponse | None = None
        self._error: RuntimeError | None = None
        self.was_cancelled = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._response = self._execution.run()
        except RuntimeError as error:
            self._error = RuntimeError(f"Request {self._number} failed: {error}")

    def get(self) -> LLMGenerationResponse:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._response is not None
        if self._response.finish_reasons == [FinishReason.CANCELLED]:
            raise RuntimeError(f"Request {self._number} was cancelled.")
        return self._response

    def ready(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        self.was_cancelled = True
        self._channel.cancel()

    def stream(self) -> StreamChannel:
        return self._channel

    def valid(self) -> bool:
        return True

    @property
    def id(self) -> int:
        return self._number


class RequestEngine:
    behaviour: Behaviour

    def __init__(
        self,
        engine_dir: str,
        multimodal_engine_dir: str = "",
        lora_weights_map: dict[str, str] | None = None,
        checkpoint_dir: str = "",
        context_cache_config: Any = None,
        max_batch_size: int = 1,
        max_pending_requests: int = 256,
        command_queue_capacity: int = 64,
        capture_cuda_graph: bool = True,
    ) -> None:
        self.args = (engine_dir, checkpoint_dir, max_batch_size)
        self.running = True
        self.handles: list[RequestHandle] = []
        self.behaviour.runtimes.append(self)

    def submit(self, request: Any) -> RequestHandle:
        if not self.running:
            raise SubmitError("the engine is shut down")
        self.behaviour.calls.append(_record(request))
        self.handles.append(RequestHandle(self.behaviour, len(self.handles), request))
        return self.handles[-1]

    def count_prompt_tokens(self, request: Any) -> list[int]:
        return _counts(self.behaviour, request)

    def cancel(self, request_id: int) -> None:
        self.handles[request_id].cancel()

    def shutdown(self, mode: ShutdownMode = ShutdownMode.DRAIN) -> None:
        self.running = False
        for handle in self.handles:
            handle.cancel()


def make_module(behaviour: Behaviour, values: Any = None) -> SimpleNamespace:
    """A fake native module. `values` may be the vendor's real one: then its value classes and enums are used, with the
    runtime, the response and the channel still being the fakes of this file.
    """
    names = {
        name: getattr(values, name) if values is not None and hasattr(values, name) else cls
        for name, cls in VALUE_CLASSES.items()
    }
    if values is not None:
        names["LLMGenerationRequest"] = _with_fake_channels(values.LLMGenerationRequest)
    driven = {cls.__name__: type(cls.__name__, (cls,), {"behaviour": behaviour}) for cls in (LLMRuntime, RequestEngine)}
    return SimpleNamespace(
        **names,
        **driven,
        StreamChannel=StreamChannel,
        SubmitError=SubmitError,
        set_profiling_enabled=behaviour.profiling.append,
        get_profiling_enabled=lambda: bool(behaviour.profiling and behaviour.profiling[-1]),
    )


def _with_fake_channels(real: Any) -> Any:
    """The vendor's request class, except that its channels may be fakes: its own type-checks them."""

    class RequestWithFakeChannels(real):  # type: ignore[misc]
        stream_channels: list[Any] = []  # noqa: RUF012 - replaces a property of the base class

    return RequestWithFakeChannels
