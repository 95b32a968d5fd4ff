"""Compile segments to plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_worker.engine.build.segments import Segment, node_weight_groups
from edgellm_worker.engine.errors import NetworkRefused
from edgellm_worker.engine.ops.graph import Graph
from edgellm_worker.engine.ops.tensorrt_layers import Layers
from edgellm_worker.engine.ops.tensorrt_rows import Emitter, emit_row_op
from edgellm_worker.engine.ops.tensorrt_whole import emit_whole
from edgellm_worker.engine.trt import Library, Target


@dataclass(frozen=True, slots=True)
class RowRange:
    """One optimization profile: rows (tokens in one call) from `least` to `most`, tuned for `typical`."""

    least: int
    typical: int
    most: int


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """`optimization_level` 0 to 5: how long the library searches for kernels (0 the least)."""

    target: Target = Target.CURRENT
    optimization_level: int | None = None
    workspace_bytes: int = 16 << 30  # a bound, not a reservation: weight-only products decode whole weights there


class Builder:
    """Compiles for one library and target; the library's own messages are collected for the error."""

    def __init__(self, library: Library, settings: BuildSettings) -> None:
        self._library = library
        self._trt = library.module
        self._settings = settings
        self._logger = collecting_logger(library)
        self._timing_cache: Any = None
        self._builder: Any = None  # making one loads the library's kernels: seconds

    def compile(self, segment: Segment, ranges: Sequence[RowRange]) -> bytes:
        """-> a serialized plan. Raises `NetworkRefused` with what the library said."""
        self._logger.messages.clear()
        builder = self._made()
        network = builder.create_network(self._network_flags())
        config = self._config(builder)
        layers = Layers(self._library, network)
        emit_segment(layers, segment)
        for row_range in ranges:
            config.add_optimization_profile(self._profile(builder, segment, row_range))
        return self._serialized(network, config)

    def compile_whole(self, graph: Graph) -> bytes:
        """-> a plan of a whole pass, for a library with native attention (ops/tensorrt_whole.py). float32 products are
        float32: what the recurrent state goes through must not be rounded to ten bits.
        """
        self._logger.messages.clear()
        network = self._made().create_network(self._network_flags())
        config = self._config(self._made())
        config.clear_flag(self._trt.BuilderFlag.TF32)
        layers = Layers(self._library, network)
        emit_whole(layers, graph)
        return self._serialized(network, config)

    def _made(self) -> Any:
        if self._builder is None:
            self._builder = self._trt.Builder(self._logger)
        return self._builder

    def _serialized(self, network: Any, config: Any) -> bytes:
        plan = self._made().build_serialized_network(network, config)
        if plan is None:
            raise NetworkRefused(
                f"{self._library.name} cannot compile a network for {self._settings.target}:"
                f" {self._logger.text() or 'it does not say why'}"
            )
        return bytes(plan)

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        if self._library.is_strongly_typed:
            return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        return 1 << int(flags.EXPLICIT_BATCH)

    def _config(self, builder: Any) -> Any:
        config = builder.create_builder_config()
        config.set_memory_pool_limit(self._trt.MemoryPoolType.WORKSPACE, self._settings.workspace_bytes)
        if self._settings.optimization_level is not None:
            config.builder_optimization_level = self._settings.optimization_level
        if not self._library.is_strongly_typed:
            config.set_flag(self._trt.BuilderFlag.FP16)
            config.set_flag(self._trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
            # Contexts of several row counts use one profile at once; later releases always allow it.
            config.set_preview_feature(self._trt.PreviewFeature.PROFILE_SHARING_0806, True)
        if self._library.compiles_without_gpu and self._settings.target is not Target.CURRENT:
            config.num_compute_capabilities = 1
            capability = getattr(self._trt.ComputeCapability, self._settings.target.upper())
            config.set_compute_capability(capability, 0)
        if not self._library.compiles_without_gpu:
            if self._timing_cache is None:
                self._timing_cache = config.create_timing_cache(b"")
            config.set_timing_cache(self._timing_cache, ignore_mismatch=False)
        return config

    def _profile(self, builder: Any, segment: Segment, rows: RowRange) -> Any:
        profile = builder.create_optimization_profile()
        for index, value in enumerate(segment.inputs):
            shapes = [(count, *value.row_shape) for count in (rows.least, rows.typical, rows.most)]
            profile.set_shape(f"x{index}", *shapes)
        return profile


def emit_segment(layers: Layers, segment: Segment) -> None:
    """Inputs `x{i}` [-1, ...], weights `w{i}`, outputs `y{i}`."""
    emitter = Emitter(layers, segment.joined)
    for index, value in enumerate(segment.inputs):
        shape = (-1, *value.row_shape)
        emitter.tensors[value] = layers.input(f"x{index}", shape, layers.data_type(value.dtype))
    used = 0
    for node in segment.nodes:
        count = len(node_weight_groups(node))
        emit_row_op(emitter, node, tuple(f"w{used + index}" for index in range(count)))
        used += count
    for index, value in enumerate(segment.outputs):
        layers.output(emitter.tensor(value), f"y{index}", layers.data_type(value.dtype))


def collecting_logger(library: Library) -> Any:
    """A logger of the library's own type (it must be) that keeps errors instead of printing them."""
    base = library.module.ILogger

    class CollectingLogger(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            base.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(base.Severity.ERROR):
                self.messages.append(message)

        def text(self) -> str:
            return "; ".join(dict.fromkeys(self.messages))

    return CollectingLogger()
