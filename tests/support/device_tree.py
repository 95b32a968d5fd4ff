"""Lay out one of tests/golden/sysfs as files."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "sysfs"
UNREADABLE = "!"


def lay_out(board: str, root: Path) -> Path:
    """A folder where the board's nodes are found as under `/`; an unreadable node is a folder of its name."""
    for line in (GOLDEN / f"{board}.tsv").read_text(encoding="utf-8").splitlines():
        path, content = line.split("\t")
        node = root / path
        node.parent.mkdir(parents=True, exist_ok=True)
        if content == UNREADABLE:
            node.mkdir()
        else:
            node.write_text(content.replace("\\n", "\n") + "\n", encoding="utf-8")
    return root
