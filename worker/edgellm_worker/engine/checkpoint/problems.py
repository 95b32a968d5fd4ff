"""What is wrong with a checkpoint, collected so that one report holds all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

WHOLE_FOLDER = ""
MAX_PER_FILE = 200  # a damaged header can be wrong about every tensor; the rest is counted, not listed


@dataclass(frozen=True, slots=True)
class Problem:
    """`file` is relative to the checkpoint folder, or WHOLE_FOLDER; `tensor` (or module, or key) is None for a fault of
    the file.
    """

    file: str
    message: str
    tensor: str | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.tensor, self.message) if part)


@dataclass(slots=True)
class ProblemLog:
    """The one list that every stage of opening a checkpoint appends to."""

    _problems: list[Problem] = field(default_factory=list)
    _num_per_file: dict[str, int] = field(default_factory=dict)

    def add(self, file: str, message: str, *, tensor: str | None = None) -> None:
        count = self._num_per_file[file] = self._num_per_file.get(file, 0) + 1
        if count <= MAX_PER_FILE:
            self._problems.append(Problem(file, message, tensor))

    def about(self, file: str) -> Callable[[str, str], None]:
        """`add` for one file, taking (name, message)."""
        return lambda name, message: self.add(file, message, tensor=name)

    def __bool__(self) -> bool:
        return bool(self._problems)

    def __len__(self) -> int:
        return sum(self._num_per_file.values())

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All of them, in the order found; files with more than MAX_PER_FILE end in a line that counts the rest."""
        rest = (
            Problem(file, f"and {count - MAX_PER_FILE} more problems in this file")
            for file, count in self._num_per_file.items()
            if count > MAX_PER_FILE
        )
        return (*self._problems, *rest)
