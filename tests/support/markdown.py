"""Reading our own pages: code blocks, links, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
RUN_MARK = "<!-- run -->"
"""Stands alone on the line before a block that the tests execute."""

_FENCE = re.compile(
    r"^(?P<mark>" + re.escape(RUN_MARK) + r"\n)?```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    language: str
    text: str
    is_runnable: bool

    @property
    def commands(self) -> list[str]:
        """Of a console block: what follows `$ `, continued lines joined; other lines are output."""
        joined = self.text.replace("\\\n", " ")
        return [line[2:].split("  #")[0].strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> Iterator[Block]:
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        yield Block(page, match["language"], match["text"], match["mark"] is not None)


def links(page: Path) -> list[str]:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def anchors(page: Path) -> set[str]:
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
