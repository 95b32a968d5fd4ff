"""Rotary position embedding: the frequencies of each published variant.

    default   theta^(-2i/R), R = head_dim * partial_rotary_factor
    linear    all divided by `factor`
    llama3    long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1 reference code)

Qwen3.5's interleaved three-axis variant (`mrope_section`) is plain rotary on text, where all axes agree.
Older configs say `rope_theta` and `rope_scaling` at the top level; newer ones say `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm_worker.engine.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """`dim` (even) is how many of a head's dims rotate."""

    theta: float
    dim: int
    scaling: Llama3Scaling | LinearScaling | None

    def inv_freq(self) -> NDArray[np.float32]:
        """[dim / 2], radians per position."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        plain = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return (plain / factor).astype(np.float32)
            case Llama3Scaling() as scaling:
                return _llama3(plain, scaling)


def read_rope(fields: Fields, head_dim: int) -> Rope:
    nested = fields.mapping("rope_parameters")
    name = "rope_parameters" if nested is not None else "rope_scaling"
    given: Mapping[str, Any] = nested or fields.mapping("rope_scaling") or {}
    inner = fields.inner(name, given)
    theta = inner.number("rope_theta") if inner.has("rope_theta") else fields.number("rope_theta", 10000.0)
    partial = "partial_rotary_factor"
    factor = inner.number(partial) if inner.has(partial) else fields.number(partial, 1.0)
    dim = int(head_dim * factor)
    fields.require(0 < dim <= head_dim and dim % 2 == 0, partial, f"rotates {dim} of {head_dim} dims")
    return Rope(theta=theta, dim=dim, scaling=_read_scaling(inner))


def _read_scaling(inner: Fields) -> Llama3Scaling | LinearScaling | None:
    kind = inner.text("rope_type", inner.text("type", "default"))
    match kind:
        case "default" | "mrope":
            return None
        case "linear":
            return LinearScaling(inner.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=inner.number("factor"),
                low_freq_factor=inner.number("low_freq_factor"),
                high_freq_factor=inner.number("high_freq_factor"),
                original_max_positions=inner.positive("original_max_position_embeddings"),
            )
    inner.require(False, "rope_type", f"{kind!r} is not supported")
    return None


def _llama3(plain: NDArray[np.float32], scaling: Llama3Scaling) -> NDArray[np.float32]:
    turns = scaling.original_max_positions * plain.astype(np.float64) / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((kept + (1 - kept) / scaling.factor) * plain).astype(np.float32)
