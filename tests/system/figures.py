"""A router's metrics, parsed for tests."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import until

GAUGES = (
    "baton_requests_running",
    "baton_requests_waiting",
    "baton_worker_running",
    "baton_worker_waiting",
    "baton_kv_inflight_bytes",
)


class Figures:
    """One reading of /metrics; every series by its name and labels."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        def answer() -> str:
            """Empty while not every router process has answered in time."""
            got = httpx.get(url + "/metrics", trust_env=False, headers=headers, timeout=60)
            return got.text if got.is_success else ""

        text = until(answer, "figures")
        self.samples = [
            sample for each in text_string_to_metric_families(text) for sample in each.samples
        ]

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The samples of a series that have these labels, by another of its labels."""
        return {
            sample.labels[label]: sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items() and sample.value
        }

    def one(self, name: str, **labels: str) -> float:
        """The one sample of this name and these labels."""
        (value,) = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return value

    @property
    def ended(self) -> float:
        """How many requests have ended, whatever their outcome."""
        return sum(self.by("outcome", "baton_requests_total").values())

    @property
    def busy(self) -> list[Any]:
        """Gauges that are not 0, used blocks among them."""
        return [
            sample
            for sample in self.samples
            if sample.value and (sample.name in GAUGES or sample.labels.get("state") == "used")
        ]


def figures_at(url: str, ended: float) -> Figures:
    """The figures when so many requests have ended.

    A router process that does not answer within a second is counted as it was before.
    """

    def found() -> Figures | None:
        figures = Figures(url)
        return figures if figures.ended == ended else None

    return until(found, f"{ended} requests have ended")  # type: ignore[no-any-return]
