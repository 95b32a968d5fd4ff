"""The worker's metric table as sets of names, for holding dashboards and alerts against it."""

from __future__ import annotations

from edgellm_worker.metrics.definitions import DEFINITIONS, Definition, Kind

_SUFFIXES = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.COUNTER: ("",), Kind.GAUGE: ("",)}
TARGET_LABELS = {"instance", "job"}
"""What Prometheus adds to every scraped series."""


def _labels(definition: Definition, suffix: str) -> set[str]:
    own = set(definition.label.names) if definition.label else set()
    return own | TARGET_LABELS | ({"le"} if suffix == "_bucket" else set())


SERIES: dict[str, set[str]] = {
    definition.full_name + suffix: _labels(definition, suffix)
    for definition in DEFINITIONS
    for suffix in _SUFFIXES[definition.kind]
}
"""Series name in the exposition -> label names."""
