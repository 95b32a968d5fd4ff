"""What the worker tells Prometheus: a table of definitions, and one object that owns every series.

    definitions   the table: name, kind, unit, labels and their values, help
    series        the values, and how the library is shown them
    exposition    `Metrics`: the registry and what each event of the daemon adds to it
    reference     docs/metrics.md, written from the table

Rules: every series whose labels are known exists from the start; a label is an enum, a position or a configured name,
never a job, a tenant or text, so that the number of series is bounded; no `_created` series.
"""

from edgellm_worker.metrics.exposition import CONTENT_TYPE, Metrics, MetricsShape

__all__ = ["CONTENT_TYPE", "Metrics", "MetricsShape"]
