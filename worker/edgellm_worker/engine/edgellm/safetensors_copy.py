"""A safetensors file written piece by piece: no tensor but the one at hand is in memory.

8 bytes N little-endian | N bytes of JSON, padded with blanks to a multiple of 8 | data in the order of the header
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from edgellm_worker.engine.checkpoint.dtypes import DTYPES
from edgellm_worker.engine.checkpoint.weights import Array

_ALIGN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor to write; `load` is called when its turn comes and returns `shape` elements of `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, tensors: Iterable[Outgoing]) -> None:
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        stop = position + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in ordered:
            data = np.ascontiguousarray(tensor.load(), DTYPES[tensor.dtype])
            file.write(data.view(np.uint8).tobytes() if data.ndim else data.tobytes())
