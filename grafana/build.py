"""Write the dashboards as JSON: `python -m grafana.build`, or `--check` to compare only (exit 1 when stale)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from grafana.boards import BOARDS
from grafana.panel import Board, render

FOLDER: Final = Path(__file__).parent / "dashboards"


def text_of(board: Board) -> str:
    return json.dumps(render(board), indent=1, ensure_ascii=False) + "\n"


def path_of(board: Board) -> Path:
    return FOLDER / f"{board.uid}.json"


def stale() -> list[Path]:
    """Files that differ from what the boards say, or that no board owns."""
    wanted = {path_of(board): text_of(board) for board in BOARDS}
    present = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return sorted(path for path in wanted.keys() | present.keys() if wanted.get(path) != present.get(path))


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for path in stale():
            print(f"stale: {path} (run python -m grafana.build)")
        return 1 if stale() else 0
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for board in BOARDS:
        path_of(board).write_text(text_of(board), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
