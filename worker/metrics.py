"""The Prometheus metrics of a worker, for its `GET /metrics`.

Metrics that the router also exports have the same meaning here, but no labels `role` and `rank`:
Prometheus adds the label `instance`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wire.process.exposition import (
    LATENCY_S,
    Distribution,
    counter,
    frames,
    gauge,
    histogram,
    tally,
)
from wire.process.frame_counters import Traffic
from worker.config import Config
from worker.engine.engine import Engine
from worker.engine.stats import STEP_S, Slots, Stats
from worker.tiers.store import TierFigures


class TransferCounts:
    """Counts ended KV transfers; `ends` has the number by outcome: done, failed, cancelled."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.kv_bytes = 0
        self.skipped_bytes = 0
        self.seconds = Distribution(
            "baton_kv_transfer_seconds", "From the accepted offer to the end.", LATENCY_S
        )

    def end(self, how: str, kv_bytes: int, skipped_bytes: int, seconds: float | None) -> None:
        """Count one ended transfer, `seconds` after it was accepted (None if it was not)."""
        self.ends[how] += 1
        self.kv_bytes += kv_bytes
        self.skipped_bytes += skipped_bytes
        if seconds is not None:
            self.seconds.observe(seconds)


class Role(Protocol):
    """The values that metrics read from a prefill or decode role."""

    transfers: TransferCounts

    @property
    def kv_inflight_bytes(self) -> int: ...


class Metrics(Collector):
    """Collects the metrics of one worker; `Worker` updates `loop_lag_s`, the event loop's lag."""

    def __init__(
        self,
        engine: Engine,
        role: Role,
        config: Config,
        planes: Mapping[str, Traffic],
        peers_up: Callable[[], Mapping[str, int]],
    ) -> None:
        self.loop_lag_s = 0.0
        self._engine, self._role = engine, role
        self._config, self._planes, self._peers_up = config, planes, peers_up
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(role.transfers.seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return no metric names, so that registering does not call `collect` to find them."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from _engine(stats)
        yield from _slots(self._engine.slots())
        yield from _steps(stats)
        if self._engine.tiering is not None:
            yield from _tiers(self._engine.tiering.figures())
        yield from self._transfers()
        yield from frames(self._planes)
        shape = {"shards": self._config.tensor_parallel, "stages": self._config.pipeline_parallel}
        yield _labelled("worker_parallel", "Into how many the model is divided.", "kind", shape)
        yield _labelled("peers_up", "Connections that are up.", "kind", self._peers_up())
        yield gauge(
            "event_loop_lag_seconds", "How late the last timer of the loop was.", self.loop_lag_s
        )

    def _transfers(self) -> Iterator[Metric]:
        books = self._role.transfers
        yield tally("kv_transfers", "Transfers that ended here.", "outcome", books.ends)
        yield counter("kv_transfer_bytes", "KV that crossed the network.", books.kv_bytes)
        yield counter(
            "kv_transfer_skipped_bytes", "KV the decode worker held already.", books.skipped_bytes
        )
        yield gauge("kv_inflight_bytes", "KV under way.", self._role.kv_inflight_bytes)
        for name in ("kv_inflight", "kv_transfer"):
            limit = getattr(self._config, f"max_{name}_bytes")
            yield gauge(f"{name}_limit_bytes", f"max_{name}_bytes.", limit)


def _engine(stats: Stats) -> Iterator[Metric]:
    counters = stats.counters
    yield gauge("worker_running", "Sequences that run.", stats.num_running)
    yield gauge("worker_waiting", "Sequences without blocks.", stats.num_waiting)
    yield gauge("worker_reserving", "KV that waits for blocks.", stats.num_reserving)
    yield gauge("worker_swapped", "Sequences in host memory.", stats.num_swapped)
    yield gauge("swap_bytes", "Host memory of swapped KV.", stats.swap_bytes)
    states = ("used", "cached", "free")
    blocks = {state: getattr(stats, f"blocks_{state}") for state in states}
    yield _labelled("blocks", "KV blocks.", "state", blocks)
    if stats.window_blocks_total:
        blocks = {state: getattr(stats, f"window_blocks_{state}") for state in states}
        yield _labelled("window_blocks", "KV blocks of layers with a window.", "state", blocks)
    yield counter("worker_preemptions", "Sequences that had to yield.", counters.preemptions)
    ends = ("finished", "failed", "cancelled")
    yield tally(
        "worker_sequences", "Ended ones.", "outcome", {end: getattr(counters, end) for end in ends}
    )
    kinds = ("prefill", "decode", "cached", "drafted", "accepted")
    tokens = {kind: getattr(counters, f"{kind}_tokens") for kind in kinds}
    yield tally("worker_tokens", "Tokens read, sampled, found, guessed.", "kind", tokens)


def _tiers(figures: TierFigures) -> Iterator[Metric]:
    host, disk = figures.host, figures.disk
    blocks = {"host": host.blocks, "disk": disk.blocks}
    yield _labelled("tier_blocks", "KV blocks below the KV cache.", "tier", blocks)
    sizes = {"host": host.bytes, "disk": disk.bytes}
    yield _labelled("tier_bytes", "What these blocks take.", "tier", sizes)
    tokens = {"host": host.loaded_tokens, "disk": disk.loaded_tokens}
    yield tally("tier_tokens", "Tokens loaded instead of computed.", "tier", tokens)
    yield tally("tier_failures", "Failed or skipped operations.", "kind", figures.failures)


def _slots(slots: Slots) -> Iterator[Metric]:
    yield gauge(
        "worker_utilization_ratio", "Sequences that run, of those that may.", slots.utilization
    )
    yield gauge(
        "worker_tokens_per_second",
        "What the running sequences generate together, each since it started here.",
        slots.tokens_per_second,
    )


def _steps(stats: Stats) -> Iterator[Metric]:
    counters = stats.counters
    parts = {part: getattr(counters, f"{part}_s") for part in ("forward", "draft", "overhead")}
    yield counter("worker_steps", "Engine steps.", counters.steps)
    yield histogram(
        "baton_step_seconds", "One step.", STEP_S, counters.step_counts, sum(parts.values())
    )
    yield tally("step_parts_seconds", "Where the time of steps went.", "part", parts)


def _labelled(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"baton_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
