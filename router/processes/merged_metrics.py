"""Merges the metrics of several processes by adding their values.

A counter must not decrease when a process dies, so its counters are kept, but not its gauges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]
# The only metric that is merged by taking the maximum instead of the sum.
LAG: Final = "baton_event_loop_lag_seconds"


class Family(Struct):
    """A metric family as a message; a sample is a name, labels and a value."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, Labels, float]]


Families = list[Family]


def families(metrics: Iterable[Metric]) -> Families:
    """Convert the metrics of this process to messages."""
    return [
        Family(
            each.name,
            each.documentation,
            each.type,
            [(it.name, tuple(it.labels.items()), it.value) for it in each.samples],
        )
        for each in metrics
    ]


def summed(processes: Iterable[Families]) -> Families:
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for family in (each for process in processes for each in process):
        found.setdefault(family.name, family)
        series = values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            before = series.get((name, labels), 0.0)
            highest = max(before, value)
            series[name, labels] = highest if family.name == LAG else before + value
    return [
        Family(it.name, it.help, it.kind, [(*key, value) for key, value in values[name].items()])
        for name, it in found.items()
    ]


def without_gauges(process: Families) -> Families:
    """Return the metrics to keep when their process has died: all but gauges."""
    return [family for family in process if family.kind != "gauge"]


class Series(Collector):
    """A collector for merged metrics, and for metrics of this process that are not merged."""

    def __init__(self, merged: Families, own: Iterable[Metric]) -> None:
        self._merged, self._own = merged, own

    def collect(self) -> Iterator[Metric]:
        for family in self._merged:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
        yield from self._own
