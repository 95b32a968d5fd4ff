"""The one place that imports an NVIDIA inference library, and what each of them can do.

`tensorrt` (8.6, 10.x, 11.x: data-centre GPUs, Jetson by JetPack) and `tensorrt_rtx` (RTX GPUs, DGX Spark, pip) share
most of their Python API. The rest of the engine asks `Library` instead of comparing versions.

    flavour         strongly typed   FP8   FP4    compiles without a GPU
    tensorrt 8.6    no               no    no     no
    tensorrt 10.x   yes              yes   10.8   no
    tensorrt 11.x   always           yes   yes    no
    tensorrt_rtx    yes              yes   yes    yes, for the targets in `Target`
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgellm_worker.engine.errors import BuildError
from edgellm_worker.engine.ops.graph import Lowering


class Flavour(StrEnum):
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt_rtx"


class Target(StrEnum):
    """A GPU architecture to compile for; CURRENT is the GPU of this machine."""

    CURRENT = "current"
    SM80 = "sm80"
    SM86 = "sm86"
    SM89 = "sm89"
    SM120 = "sm120"
    SM121 = "sm121"


@dataclass(frozen=True, slots=True)
class Library:
    """An imported library. `module` is untyped: every use of it stays in ops/tensorrt*, build and runtime/tensorrt*."""

    module: Any
    flavour: Flavour
    version: tuple[int, int, int]

    @property
    def name(self) -> str:
        return f"{self.flavour}-{'.'.join(map(str, self.version))}"

    @property
    def is_strongly_typed(self) -> bool:
        return self.flavour is Flavour.TENSORRT_RTX or self.version >= (10, 0, 0)

    @property
    def has_fp8(self) -> bool:
        return self.is_strongly_typed

    @property
    def has_fp4(self) -> bool:
        return self.flavour is Flavour.TENSORRT_RTX or self.version >= (10, 8, 0)

    @property
    def lowering(self) -> Lowering:
        return Lowering.ROWS if self.is_strongly_typed else Lowering.PRODUCTS

    @property
    def compiles_without_gpu(self) -> bool:
        return self.flavour is Flavour.TENSORRT_RTX

    def supports(self, target: Target, *, fp8: bool = False, fp4: bool = False) -> bool:
        """Whether networks with these types can be compiled for `target` (FP8 needs Ada or later, FP4 Blackwell)."""
        if (fp8 and not self.has_fp8) or (fp4 and not self.has_fp4):
            return False
        if target is Target.CURRENT:
            return True
        minimum = 120 if fp4 else 89 if fp8 else 80
        return int(target.removeprefix("sm")) >= minimum


def parse_version(text: str) -> tuple[int, int, int]:
    """Read "8.6.1" or "1.7.1.116" as three numbers; missing ones are 0."""
    numbers = [int(part) for part in text.split(".")[:3] if part.isdigit()]
    padded = (*numbers, 0, 0, 0)
    return padded[0], padded[1], padded[2]


def load_library(prefer: Flavour | None = None) -> Library:
    """Import the library `prefer` names, else the first there is. Raises `BuildError` saying what to install."""
    tried: list[str] = []
    for flavour in (prefer,) if prefer else tuple(Flavour):
        try:
            module = importlib.import_module(flavour.value)
        except ImportError as error:
            tried.append(f"{flavour.value}: {error}")
            continue
        return Library(module, flavour, parse_version(module.__version__))
    raise BuildError(
        "no TensorRT library can be imported ("
        + "; ".join(tried)
        + "): install edgellm-worker[tensorrt] for data-centre"
        " GPUs and Jetson, or edgellm-worker[rtx] for RTX GPUs and DGX Spark"
    )
