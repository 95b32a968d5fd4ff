"""One safetensors file: its header read strictly, its data mapped.

    0        8          8+N                      file end
    | N: u64 | N bytes  | data                   |
               JSON: name -> {dtype, shape, data_offsets: [begin, end)}; offsets count from 8+N

The format promises that the data intervals neither overlap nor leave holes, and that they end where the file ends. The
safetensors library stops at the first breach and names no tensor, so the header is read here and every breach reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_worker.engine.checkpoint.dtypes import DTYPES
from edgellm_worker.engine.checkpoint.jsonfile import JsonObject, parse_json_object
from edgellm_worker.engine.checkpoint.problems import ProblemLog
from edgellm_worker.engine.checkpoint.weights import Array

MAX_HEADER_BYTES = 8 * 2**20  # about 50 000 tensors in one file
MAX_RANK = 8
LENGTH_BYTES = 8
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file; [start, stop) in bytes from the start of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(slots=True)
class Shard:
    """An opened file. The mapping is made at the first use and lives as long as the arrays that look into it.

    `refused` are tensors that the header names but that cannot be used; each is in the problems.
    """

    path: Path
    file: str
    size_bytes: int
    entries: tuple[TensorEntry, ...]
    refused: frozenset[str]
    _map: np.memmap[Any, Any] | None = field(default=None, repr=False)

    def array(self, entry: TensorEntry) -> Array:
        """A read-only view of the tensor's bytes in its own element type."""
        dtype = DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return np.empty(entry.shape, dtype)
        if self._map is None:
            self._map = np.memmap(self.path, dtype=np.uint8, mode="r")
        raw = np.asarray(self._map)[entry.start : entry.stop]
        return raw.view(dtype).reshape(entry.shape)


def open_shard(folder: Path, file: str, problems: ProblemLog) -> Shard | None:
    """Read the header of `folder/file`. None when nothing of it can be used; broken tensors are left out and named."""
    path = folder / file
    try:
        if not path.is_file():
            problems.add(file, "missing shard: no such file")
            return None
        size_bytes = path.stat().st_size
        with path.open("rb") as stream:
            header = _read_header(stream.read(LENGTH_BYTES), size_bytes, file, problems)
            data = None if header is None else stream.read(header)
    except OSError as error:
        problems.add(file, f"cannot be read: {error.strerror}")
        return None
    if data is None:
        return None
    parsed = parse_json_object(data, file, problems)
    if parsed is None:
        return None
    data_start = LENGTH_BYTES + len(data)
    entries = tuple(_entries(parsed, file, data_start, size_bytes, problems))
    refused = frozenset(parsed.keys() - {METADATA} - {entry.name for entry in entries})
    _check_overlaps(entries, data_start, problems)
    if not refused:  # tensors that were refused leave holes behind, which say nothing new
        _check_holes(entries, file, (data_start, size_bytes), problems)
    return Shard(path, file, size_bytes, entries, refused)


def _read_header(prefix: bytes, size_bytes: int, file: str, problems: ProblemLog) -> int | None:
    """The header's length in bytes, or None."""
    if len(prefix) < LENGTH_BYTES:
        problems.add(file, f"{size_bytes} bytes: too short for a safetensors header")
        return None
    length = int.from_bytes(prefix, "little")
    if length > size_bytes - LENGTH_BYTES:
        problems.add(file, f"header of {length} bytes is longer than the file ({size_bytes} bytes)")
        return None
    if length > MAX_HEADER_BYTES:
        problems.add(file, f"header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        return None
    return length


def _entries(
    header: JsonObject, file: str, data_start: int, size_bytes: int, problems: ProblemLog
) -> Iterator[TensorEntry]:
    for name, value in header.items():
        if name == METADATA:
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                problems.add(file, "must map strings to strings", tensor=name)
            continue
        entry = _entry(name, value, file, data_start, problems)
        if entry is None:
            continue
        if entry.stop > size_bytes:
            message = f"truncated: ends at byte {entry.stop} of a file of {size_bytes}"
            problems.add(file, message, tensor=name)
            continue
        yield entry


def _entry(name: str, value: Any, file: str, data_start: int, problems: ProblemLog) -> TensorEntry | None:
    """One header line, checked by itself."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        problems.add(file, "header entry must hold dtype, shape and data_offsets", tensor=name)
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problems.add(file, f"unknown dtype {_brief(dtype)}", tensor=name)
        return None
    if not _is_naturals(shape) or len(shape) > MAX_RANK:
        problems.add(file, f"bad shape {_brief(shape)}", tensor=name)
        return None
    if not _is_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problems.add(file, f"bad data_offsets {_brief(offsets)}", tensor=name)
        return None
    begin, end = offsets
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        problems.add(file, f"{dtype} {shape} takes {num_bytes} bytes, data_offsets span {end - begin}", tensor=name)
        return None
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _by_position(entries: tuple[TensorEntry, ...]) -> list[TensorEntry]:
    return sorted(entries, key=lambda item: (item.start, item.stop))


def _check_overlaps(entries: tuple[TensorEntry, ...], data_start: int, problems: ProblemLog) -> None:
    position, previous = data_start, "the header"
    for entry in _by_position(entries):
        if entry.start < position and entry.num_bytes:
            message = f"overlaps {previous} by {min(position, entry.stop) - entry.start} bytes"
            problems.add(entry.file, message, tensor=entry.name)
        if entry.stop > position:
            position, previous = entry.stop, entry.name


def _check_holes(entries: tuple[TensorEntry, ...], file: str, data: tuple[int, int], problems: ProblemLog) -> None:
    position, stop = data
    for entry in _by_position(entries):
        if entry.start > position:
            problems.add(file, f"{entry.start - position} unused bytes before it", tensor=entry.name)
        position = max(position, entry.stop)
    if position < stop:
        problems.add(file, f"{stop - position} bytes after the last tensor belong to none")


def tensor_map(shards: Mapping[str, Shard], problems: ProblemLog) -> dict[str, TensorEntry]:
    """All tensors of all files by name; a name in two files is a problem and the first one stays."""
    result: dict[str, TensorEntry] = {}
    for shard in shards.values():
        for entry in shard.entries:
            if entry.name in result:
                problems.add(shard.file, f"duplicate tensor: also in {result[entry.name].file}", tensor=entry.name)
            else:
                result[entry.name] = entry
    return result
