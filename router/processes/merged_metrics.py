"""Merges the metrics of several processes: counters and histograms are added.

A counter must not fall because a process died: what it had counted stays, its gauges do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]
# The gauge of which the highest counts; all others are added too.
LAG: Final = "baton_event_loop_lag_seconds"


class Family(Struct):
    """A family of series: each its name, its labels and its value."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, Labels, float]]


Families = list[Family]


def families(metrics: Iterable[Metric]) -> Families:
    """Return series as they can be told to another process."""
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
    """Return the series of all of them together."""
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
    """Return what still counts of a process that has ended."""
    return [family for family in process if family.kind != "gauge"]


class Series(Collector):
    """Series of other processes, and metrics of this one, as a registry has them."""

    def __init__(self, given: Families, own: Iterable[Metric]) -> None:
        self._given, self._own = given, own

    def collect(self) -> Iterator[Metric]:
        for family in self._given:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
        yield from self._own
