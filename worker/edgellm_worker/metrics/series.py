"""The values of every series, as plain numbers that the Prometheus library is shown at a scrape.

Counting happens for every job and every step, scrapes every few seconds: so a count is an addition in a dictionary,
without the library's lock and walk over the buckets. The event loop alone counts; a scrape, in a thread of its own,
reads copies. It may see an observation in its bucket and not yet in the sum, as with the library's own histograms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from edgellm_worker.metrics.definitions import Definition, Kind

Labels = tuple[str, ...]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Histogram:
    """`bounds` ascending; a value belongs to the first bound that is not below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: Final = (*bounds, math.inf)
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus counts in each bucket all that is in those before it."""
        total, found = 0, []
        for bound, count in zip(self.bounds, self.counts, strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return found


class SeriesTable(Collector):
    """A series without labels exists from the start; one with labels from its first use, or from `create` on."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        self._definitions = {definition.name: definition for definition in definitions}
        self._numbers: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        for name, definition in self._definitions.items():
            if definition.kind is Kind.HISTOGRAM:
                self._histograms[name] = {}
            else:
                self._numbers[name] = {}
            if definition.label is None:
                self.create(name)

    def create(self, name: str, *labels: str) -> None:
        definition = self._definitions[name]
        if definition.kind is Kind.HISTOGRAM:
            self._histograms[name][labels] = Histogram(definition.buckets)
        else:
            self._numbers[name][labels] = 0.0

    def add(self, name: str, amount: float, *labels: str) -> None:
        values = self._numbers[name]
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self._numbers[name][labels] = value

    def histogram(self, name: str) -> Histogram:
        """The one series of a histogram without labels, to observe it often."""
        return self._histograms[name][()]

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._histograms[name][labels].observe(value)

    def clear(self, name: str) -> None:
        self._numbers[name] = {}

    def collect(self) -> Iterator[Family]:
        for name, definition in self._definitions.items():
            names = definition.label.names if definition.label else ()
            if definition.kind is Kind.HISTOGRAM:
                histogram = HistogramMetricFamily(definition.full_name, definition.help, labels=names)
                for labels, one in tuple(self._histograms[name].items()):
                    histogram.add_metric(labels, one.buckets(), one.sum)
                yield histogram
                continue
            kind = CounterMetricFamily if definition.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(definition.full_name, definition.help, labels=names)
            for labels, value in tuple(self._numbers[name].items()):
                family.add_metric(labels, value)
            yield family
