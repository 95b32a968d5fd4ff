"""The recorded signatures of the vendor's native module, parsed: tests/golden/edgellm_pybind_0.11.0.txt."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

DUMP = Path(__file__).parent.parent / "golden" / "edgellm_pybind_0.11.0.txt"

_PARAMETER = re.compile(r"[(,]\s*(\w+)\s*:")


@dataclass(frozen=True)
class DumpedClass:
    """`properties` maps a name to whether it can be set; `methods` to its parameter names over all overloads;
    `defaults` a property to the repr of its value in a new object; `members` are an enum's.
    """

    name: str
    properties: dict[str, bool] = field(default_factory=dict)
    methods: dict[str, set[str]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Dump:
    classes: dict[str, DumpedClass]
    functions: dict[str, set[str]]


def parameters_of(signature: str) -> set[str]:
    return set(_PARAMETER.findall(signature)) - {"self"}


def load_dump() -> Dump:
    dump = Dump({}, {})
    current: DumpedClass | None = None
    method: set[str] | None = None
    for line in DUMP.read_text().splitlines():
        if line.startswith("="):
            current, method = _open_section(dump, line)
        elif current is not None and line.startswith("  PROP "):
            name, setter = line.removeprefix("  PROP ").split(" | ")[:2]
            current.properties[name] = setter == "setter"
            method = None
        elif current is not None and line.startswith("  DEF "):
            name, _, signature = line.removeprefix("  DEF ").partition(" : ")
            method = current.methods.setdefault(name, set())
            method |= parameters_of(signature)
        elif current is not None and line.startswith("  ATTR "):
            name = line.split()[1]
            current.members[name] = int(re.search(r": (\d+)>", line).group(1))  # type: ignore[union-attr]
        elif current is not None and line.startswith("  DEFAULTS: "):
            current.defaults.update(ast.literal_eval(line.removeprefix("  DEFAULTS: ")))
        elif method is not None:
            method |= parameters_of(line)
    return dump


def _open_section(dump: Dump, line: str) -> tuple[DumpedClass | None, set[str] | None]:
    title = line.lstrip("= ")
    if title.startswith("FUNC "):
        name, _, signature = title.removeprefix("FUNC ").partition(" : ")
        dump.functions[name] = parameters_of(signature)
        return None, None
    name = title.split()[0]
    dump.classes[name] = DumpedClass(name)
    return dump.classes[name], None
