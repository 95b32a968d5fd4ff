"""The vendor's native module: where it comes from and what it can do.

What it can do is read from the module itself, never from a version string: a later release may let speculative rows
join a running batch, and a patched build may lack something that its number promises. pybind11 functions carry their
signatures in the docstring's first lines, which is where `accepted_parameters` looks when `inspect` finds none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, Protocol

from edgellm_worker.engine.errors import BuildError

DISTRIBUTION: Final = "tensorrt-edgellm"

_PARAMETER: Final = re.compile(r"[(,]\s*(\w+)\s*:")


class NativeChannel(Protocol):
    """One row's token channel. The runtime writes, this worker reads; `cancel` is seen at the next round."""

    def try_pop(self) -> Any: ...
    def wait_pop(self, timeout_ms: int) -> Any: ...
    def is_finished(self) -> bool: ...
    def get_reason(self) -> Any: ...
    def cancel(self) -> None: ...


class NativeRuntime(Protocol):
    """`LLMRuntime`. `handle_request` blocks for a whole batch and refuses a second call while one runs."""

    def handle_request(self, request: Any) -> Any: ...
    def count_prompt_tokens(self, request: Any) -> list[int]: ...
    def capture_decoding_cuda_graph(self) -> bool: ...
    def get_spec_decode_generation_metrics(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a native module offers.

    batched_drafting      `LLMRuntime` takes draft settings, and a request a list of rows with channels
    in_flight             `RequestEngine` exists
    in_flight_drafting    ... and takes draft settings: speculative rows may join a running batch (0.11.0: no)
    drafting_counters     aggregate counters of a speculative runtime can be read
    """

    batched_drafting: bool
    in_flight: bool
    in_flight_drafting: bool
    drafting_counters: bool


def accepted_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of `function`, over all overloads of a pybind11 function."""
    documented = frozenset(_PARAMETER.findall(function.__doc__ or ""))
    try:
        return documented | frozenset(inspect.signature(function).parameters)
    except ValueError:
        return documented


def detect(module: Any) -> Capabilities:
    draft_settings = {"draft_top_k", "draft_step", "verify_tree_size"}
    engine = getattr(module, "RequestEngine", None)
    return Capabilities(
        batched_drafting=draft_settings <= accepted_parameters(module.LLMRuntime.__init__)
        and hasattr(module.LLMGenerationRequest(), "stream_channels"),
        in_flight=engine is not None,
        in_flight_drafting=engine is not None and draft_settings <= accepted_parameters(engine.__init__),
        drafting_counters=hasattr(module.LLMRuntime, "get_spec_decode_generation_metrics"),
    )


def package_version() -> str:
    """Raises `BuildError` when the vendor's package is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        message = f"--engine edgellm needs the package {DISTRIBUTION}; install it beside this one"
        raise BuildError(message) from error


def load_native() -> Any:
    """Import the vendor's native module for this machine. Raises `BuildError` with the vendor's own reason.

    The vendor selects a payload by Python ABI, architecture, CUDA and TensorRT sonames, GPU and Linux release; what it
    raises when none fits is no ImportError.
    """
    package_version()
    try:
        from tensorrt_edgellm import runtime  # noqa: PLC0415 - only when this engine was chosen
    except ImportError as error:
        raise BuildError(f"{DISTRIBUTION} is installed but cannot be imported: {error}") from error
    try:
        return runtime.load()
    except runtime.NativeRuntimeError as error:
        raise BuildError(f"{DISTRIBUTION} has no native runtime for this machine: {error}") from error
