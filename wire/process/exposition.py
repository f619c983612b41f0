"""Prometheus metrics and helpers that routers and workers share.

Metrics have base units, the prefix ``baton_`` and few label values; request ids are never labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from wire.process.frame_counters import Traffic

# Histogram buckets in seconds: from a small model, or a transfer of a few blocks within a machine,
# to a large model, or the transfer of a long prompt over a slow network.
LATENCY_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 40)
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Totals(Collector):
    """A counter with labels.  Callers increment `counts[label values]` directly, for speed."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self.counts: Counter[tuple[str, ...]] = Counter()
        if not labels:
            self.counts[()] = 0

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in tuple(self.counts.items()):
            family.add_metric(values, count)
        yield family


class Distribution(Collector):
    """A histogram that can record many equal observations at once."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self.share(value, 1)

    def share(self, total: float, times: int) -> None:
        """Record `times` equal observations whose sum is `total`."""
        self._counts[bisect_left(self._bounds, total / times)] += times
        self._sum += total

    def collect(self) -> Iterable[Metric]:
        yield histogram(self._name, self._help, self._bounds, self._counts, self._sum)


def histogram(
    name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """Return a histogram.  `counts` has one count per bucket, and one for values above all bounds.

    `name` includes the prefix.
    """
    edges = [*map(str, map(float, bounds)), "+Inf"]
    buckets = list(zip(edges, map(float, accumulate(counts)), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)


def gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"baton_{name}", help_text, value=value)


def counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"baton_{name}", help_text, value=value)


def tally(name: str, help_text: str, label: str, counts: Mapping[str, float]) -> Metric:
    """Return a counter with one label, from its counts by label value."""
    family = CounterMetricFamily(f"baton_{name}", help_text, labels=[label])
    for key, count in tuple(counts.items()):
        family.add_metric([key], count)
    return family


def frames(planes: Mapping[str, Traffic]) -> Iterator[Metric]:
    """Yield counters of frames by plane (kind of connection) and tag, and of unsent frames."""
    family = CounterMetricFamily(
        "baton_frames", "Frames by tag.", labels=["plane", "tag", "direction"]
    )
    for plane, traffic in planes.items():
        for tag, direction, count in traffic.rows():
            family.add_metric([plane, tag, direction], count)
    yield family
    unsent = CounterMetricFamily(
        "baton_frames_unsent", "Frames that could not be sent.", labels=["plane", "reason"]
    )
    for plane, traffic in planes.items():
        for reason, count in tuple(traffic.dropped.items()):
            unsent.add_metric([plane, reason], count)
    yield unsent
