"""Typed reading of a JSON object that collects every problem before it complains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgellm_worker.engine.errors import CheckpointError

MAX_NUMBER = 2**40
"""Beyond any size or frequency base; keeps arithmetic with a damaged file's numbers finite."""


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Fields:
    """One JSON object of config.json. A bad field yields a harmless value and a problem; `raise_problems` ends it."""

    def __init__(self, values: Mapping[str, Any], *, problems: list[str] | None = None, prefix: str = "") -> None:
        self._values = values
        self._problems = [] if problems is None else problems
        self._prefix = prefix

    def raise_problems(self) -> None:
        if self._problems:
            raise CheckpointError(self._problems)

    def require(self, is_right: bool, name: str, message: str) -> None:
        if not is_right:
            self._problems.append(f"config.json: {self._prefix}{name}: {message}")

    def positive(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        return self._integer(name, default, lowest=1)

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0."""
        return self._integer(name, default, lowest=0)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER:
            return float(value)
        self.require(False, name, f"a positive number is needed, not {_brief(value)}")
        return 1.0

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name)
        value = default if value is None else value
        self.require(isinstance(value, bool), name, f"true or false is needed, not {_brief(value)}")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name)
        value = default if value is None else value
        self.require(isinstance(value, str), name, f"a string is needed, not {_brief(value)}")
        return str(value)

    def names(self, name: str, default: Sequence[str]) -> list[str]:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.require(False, name, f"a list of strings is needed, not {_brief(value)}")
            return list(default)
        return [str(entry) for entry in value]

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._values.get(name)
        self.require(value is None or isinstance(value, Mapping), name, f"an object is needed, not {_brief(value)}")
        return value if isinstance(value, Mapping) else None

    def inner(self, name: str, values: Mapping[str, Any]) -> Fields:
        """The fields of a nested object; its problems are added here, named `name.field`."""
        return Fields(values, problems=self._problems, prefix=f"{name}.")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def _integer(self, name: str, default: int | None, lowest: int) -> int:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= MAX_NUMBER:
            needed = f"an integer from {lowest} to {MAX_NUMBER}"
            self.require(False, name, f"{needed} is needed, not {_brief(value)}")
            return max(lowest, 1)
        return value
