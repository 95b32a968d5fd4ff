"""Reading single-value files that may be absent, gated or briefly busy."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str | None:
    """The stripped content, or None. Not retried: a power-gated sensor answers EAGAIN for as long as it is gated."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    text = read_text(path)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def children(folder: Path, pattern: str) -> list[Path]:
    """Matching entries in a stable order; empty when the folder is absent or closed to this user."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
