"""Whether two checkpoint folders hold the same, told without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_SAMPLE_BYTES: Final = 4096
_NUM_SAMPLES: Final = 16
_WHOLE_SUFFIXES: Final = frozenset({".json", ".model", ".jinja", ".txt"})


def content_digest(model_dir: Path) -> str:
    """Of all files that a build reads, by content: small text files whole, others by size, the first bytes (a
    safetensors header or its beginning) and evenly spaced samples. Independent of path and times.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in model_dir.iterdir() if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.suffix in _WHOLE_SUFFIXES:
                digest.update(file.read())
                continue
            header_bytes = min(size, 8 + int.from_bytes(file.read(8), "little")) if path.suffix == ".safetensors" else 0
            file.seek(0)
            digest.update(file.read(header_bytes))
            for index in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
