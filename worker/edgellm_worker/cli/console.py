"""Tables for a terminal, or for a pipe whose reader may leave early."""

from __future__ import annotations

from rich.console import Console


class PipeConsole(Console):
    def on_broken_pipe(self) -> None:
        """As any write says it; the library would end the program with exit code 1."""
        raise BrokenPipeError
