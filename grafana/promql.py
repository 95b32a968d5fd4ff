"""The few PromQL shapes that the dashboards need, so that a panel is written as what it asks.

Names are without the `edgellm_` prefix. Two rules are built in:

- a worker's own series are filtered by the dashboard's `$instance` and summed over the chosen workers;
- queue-wide gauges are exported by every worker alike, so they take `max` and never a sum or an instance filter.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "edgellm_"
INSTANCE: Final = 'instance=~"$instance"'
WINDOW: Final = "$__rate_interval"


def _series(name: str, match: str = "") -> str:
    labels = f"{INSTANCE},{match}" if match else INSTANCE
    return f"{PREFIX}{name}{{{labels}}}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def gauge(name: str, *, by: str = "", agg: str = "sum", match: str = "") -> str:
    """A worker's own gauge, added up over workers unless `agg` says otherwise."""
    return f"{agg}{_by(by)} ({_series(name, match)})"


def shared(name: str, *, by: str = "") -> str:
    """A queue-wide gauge: every worker says the same, the largest is the freshest."""
    return f"max{_by(by)} ({PREFIX}{name})"


def rate(name: str, *, by: str = "", match: str = "") -> str:
    """Events per second of a counter."""
    return f"sum{_by(by)} (rate({_series(name, match)}[{WINDOW}]))"


def increase(name: str, *, by: str = "", window: str = "$__range") -> str:
    """Events of a counter in the chosen time range."""
    return f"sum{_by(by)} (increase({_series(name)}[{window}]))"


def quantile(q: float, name: str, *, by: str = "") -> str:
    """An estimate from the histogram's buckets; NaN while nothing was observed."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({_series(name + '_bucket')}[{WINDOW}])))"


def mean(name: str, *, by: str = "") -> str:
    """A histogram's mean; NaN while nothing was observed."""
    return ratio(rate(f"{name}_sum", by=by), rate(f"{name}_count", by=by))


def buckets(name: str) -> str:
    """A histogram's buckets over time, for a heatmap."""
    return f"sum by (le) (increase({_series(name + '_bucket')}[{WINDOW}]))"


def ratio(top: str, bottom: str) -> str:
    return f"{top} / {bottom}"
