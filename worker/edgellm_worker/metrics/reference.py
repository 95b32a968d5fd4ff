"""docs/metrics.md, written from the definitions: `python -m edgellm_worker.metrics.reference > docs/metrics.md`."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Final

from edgellm_worker.metrics.definitions import DEFINITIONS, Definition

_HEAD: Final = """# Metrics

Generated from `edgellm_worker/metrics/definitions.py`; do not edit.

`edgellm-worker serve` exports these on `--metrics-port` (default 9108) under `/metrics`. Every series exists from the
start, so a missing one is a fault and not "nothing yet"; only sensors are absent where the machine has none. Labels
are enums, positions and configured names, never a job, a tenant or text. Series marked *queue-wide* are the same from
every worker of a queue: aggregate them with `max()`, all others with `sum()`.
"""


def _row(definition: Definition) -> str:
    labels = ", ".join(f"`{name}`" for name in definition.label.names) if definition.label else ""
    return f"| `{definition.full_name}` | {definition.kind} | {labels} | {definition.help} |"


def reference() -> str:
    parts = [_HEAD]
    for group, definitions in groupby(DEFINITIONS, key=lambda d: d.group):
        rows = "\n".join(_row(d) for d in definitions)
        parts.append(f"## {group}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
