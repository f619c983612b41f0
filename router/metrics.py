"""`GET /metrics`: the router's metrics for Prometheus.

Figures that the core keeps anyway (workers, queues, dropped frames) are read at each scrape.  The
other metrics are counted in plain dicts and lists: the counters of the Prometheus library would
account for a tenth of all calls for a request.
"""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.dispatcher import Dispatcher
from router.core.fleet import Fleet, WorkerState
from router.core.request import RequestEnd
from router.processes.merged_metrics import LAG, Families, Series, families, summed
from router.vllm_metrics import WithVllm
from wire.errors import ErrorCode
from wire.frames import Role
from wire.process.exposition import LATENCY_S, Distribution, Totals, frames, gauge, tally
from wire.process.frame_counters import Traffic

# The bucket bounds of histograms, in seconds.
TOKEN_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10
)  # fmt: skip
REQUEST_S: Final = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 20, 40, 60, 120, 240, 600
)  # fmt: skip
NUM_TOKENS: Final = (
    1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072
)  # fmt: skip

# Counters over ended requests: name, help text, and the field of `RequestEnd` that is summed.
SUMS: Final = (
    ("prompt_tokens", "Prompt tokens of ended requests.", "prompt_tokens"),
    (
        "cached_prompt_tokens",
        "Prompt tokens that prefill workers found in their cache.",
        "cached_tokens",
    ),
    ("generated_tokens", "Tokens of ended requests.", "completion_tokens"),
    ("kv_transfer_bytes", "KV bytes handed to decode workers.", "kv_bytes"),
    (
        "kv_skipped_tokens",
        "Prompt tokens not sent because the decode worker held them.",
        "kv_skipped_tokens",
    ),
)

# Finish reasons come from workers.  Unknown ones are counted as "other", to limit the labels.
OUTCOMES: Final = frozenset({"stop", "length", *(code.label for code in ErrorCode)})


class Metrics:
    """All metrics of a router process.  It is one of `Dispatcher.observers`."""

    def __init__(
        self,
        core: Dispatcher,
        planes: Mapping[str, Traffic] | None = None,
        *,
        vllm_model: str = "",
    ) -> None:
        """With `vllm_model`, the name of the model, there are the names of vLLM too."""
        self._vllm_model = vllm_model
        self._registry = CollectorRegistry()
        self._http = self._counter(
            "http_requests",
            "HTTP requests by how they ended: a finish reason, ok, or an error code.",
            "endpoint",
            "outcome",
        )
        self._requests = self._counter(
            "requests", "Accepted requests, HTTP and TCP, by how they ended.", "outcome"
        )
        self._sums = [
            (self._counter(name, help_text), attrgetter(field)) for name, help_text, field in SUMS
        ]
        self._local_prefills = self._counter(
            "local_prefills",
            "Attempts with one worker for both prompt and answer: it costs less, or no other "
            "worker could do the prefill.",
            "reason",
        )
        self._slow_clients = self._counter("slow_clients", "Clients cut: they did not read.")
        self._lag = Gauge(
            LAG, "How late the last timer of the event loop was.", registry=self._registry
        )
        # These two reveal leaks; resident memory changes for other reasons too.
        self.tasks = Gauge("baton_tasks", "Asyncio tasks of the router.", registry=self._registry)
        blocks = Gauge(
            "baton_python_blocks",
            "Pieces of memory that Python has given out.",
            registry=self._registry,
        )
        blocks.set_function(sys.getallocatedblocks)
        self._add_histograms()
        self._registry.register(_CoreCollector(core, planes or {}))
        self._workers = _FleetCollector(core.fleet)

    def _add_histograms(self) -> None:
        self._queue = self._distribution("queue", "Wait for a worker with room.", LATENCY_S)
        self._first_token = self._distribution(
            "time_to_first_token", "From acceptance to the first token.", LATENCY_S
        )
        self._prefill = self._distribution(
            "prefill", "From the first placement to the first token.", LATENCY_S
        )
        # Called with the time since the last tokens of a stream and the number of new tokens.
        self.on_tokens = self._distribution(
            "inter_token", "Between tokens of a stream; those that come together share.", TOKEN_S
        ).share
        self._decode = self._distribution("decode", "From the first token to the end.", REQUEST_S)
        self._inference = self._distribution(
            "inference", "From the first placement to the end.", REQUEST_S
        )
        self._request = self._distribution("request", "From acceptance to the end.", REQUEST_S)
        self._prompt = self._sizes("prompt", "Prompt tokens of a request.")
        self._generation = self._sizes("generation", "Tokens generated for a request.")
        self._kv_seconds = self._distribution(
            "kv_transfer", "From the accepted offer to the last byte.", LATENCY_S
        )

    def on_request_end(self, end: RequestEnd) -> None:
        self._requests[end.outcome if end.outcome in OUTCOMES else "other",] += 1
        for counts, value_of in self._sums:
            counts[()] += value_of(end)
        for reason in end.local_reasons:
            self._local_prefills[reason,] += 1
        self._request.observe(end.total_s)
        self._prompt.observe(end.prompt_tokens)
        self._generation.observe(end.completion_tokens)
        if end.queue_s is not None:
            self._queue.observe(end.queue_s)
            self._inference.observe(end.total_s - end.queue_s)
        if end.decode_s is not None:
            self._decode.observe(end.decode_s)
        if end.ttft_s is not None:
            self._first_token.observe(end.ttft_s)
            self._prefill.observe(end.ttft_s - (end.queue_s or 0.0))
        if end.kv_seconds:
            self._kv_seconds.observe(end.kv_seconds)

    def on_response(self, endpoint: str, outcome: str) -> None:
        """Count an HTTP request.  Both labels must have few distinct values."""
        self._http[endpoint, outcome] += 1

    def on_slow_client(self) -> None:
        """Count a client that was disconnected because it read too slowly."""
        self._slow_clients[()] += 1

    def on_lag(self, lag_s: float) -> None:
        """Record how late a timer of the event loop ran, in seconds."""
        self._lag.set(lag_s)

    def families(self) -> Families:
        """Return the metrics of this process, without those of workers, which processes share."""
        return families(self._registry.collect())

    def render(self, processes: Sequence[Families] | None = None) -> bytes:
        """Return the metrics of this process, or the sum of `processes`, as Prometheus text."""
        workers = self._workers.collect()
        if processes is None:
            series = Series([], (*self._registry.collect(), *workers))
        else:
            series = Series(summed(processes), workers)
        return generate_latest(WithVllm(series, self._vllm_model) if self._vllm_model else series)

    def _counter(self, name: str, help_text: str, *labels: str) -> Tally[tuple[str, ...]]:
        """Register a counter and return the mapping from label values to counts."""
        counter = Totals(f"baton_{name}", help_text, *labels)
        self._registry.register(counter)
        return counter.counts

    def _sizes(self, name: str, help_text: str) -> Distribution:
        sizes = Distribution(f"baton_request_{name}_tokens", help_text, NUM_TOKENS)
        self._registry.register(sizes)
        return sizes

    def _distribution(self, name: str, help_text: str, bounds: Sequence[float]) -> Distribution:
        distribution = Distribution(f"baton_{name}_seconds", help_text, bounds)
        self._registry.register(distribution)
        return distribution


class _CoreCollector(Collector):
    def __init__(self, core: Dispatcher, planes: Mapping[str, Traffic]) -> None:
        self._core = core
        self._planes = planes

    def collect(self) -> Iterator[Metric]:
        yield gauge("requests_running", "Requests that do not wait.", self._core.num_running)
        yield gauge("requests_waiting", "Requests that wait for a worker.", self._core.num_waiting)
        yield tally("frames_dropped", "Frames dropped.", "reason", self._core.dropped)
        yield tally("requests_rejected", "Requests refused.", "code", self._core.rejected)
        yield tally("failovers", "Attempts followed by another.", "code", self._core.failovers)
        yield from frames(self._planes)


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        limit = self._fleet.max_kv_transfer_bytes
        yield gauge("kv_transfer_limit_bytes", "max_kv_transfer_bytes.", limit)
        yield self._workers()
        yield from self._loads()

    def _workers(self) -> Metric:
        states = Tally((worker.role, worker.state) for worker in self._fleet)
        family = GaugeMetricFamily("baton_workers", "Workers.", labels=["role", "state"])
        for role in (Role.PREFILL, Role.DECODE, Role.ANY):
            for state in WorkerState:
                family.add_metric([_name(role), state.value], states[role, state])
        return family

    def _loads(self) -> Iterator[Metric]:
        peer = ["role", "rank"]
        running = GaugeMetricFamily("baton_worker_running", "Running sequences.", labels=peer)
        waiting = GaugeMetricFamily("baton_worker_waiting", "Waiting sequences.", labels=peer)
        steps = CounterMetricFamily("baton_worker_steps", "Engine steps.", labels=peer)
        preempted = CounterMetricFamily("baton_worker_preemptions", "Preemptions.", labels=peer)
        moving = GaugeMetricFamily("baton_kv_inflight_bytes", "KV under way.", labels=peer)
        blocks = GaugeMetricFamily("baton_blocks", "KV blocks.", labels=[*peer, "state"])
        up = GaugeMetricFamily("baton_peer_up", "1: it beats and is not lost.", labels=peer)
        for worker in self._fleet:
            labels = [_name(worker.role), str(worker.rank)]
            up.add_metric(labels, worker.state is not WorkerState.LOST)
            running.add_metric(labels, worker.running)
            waiting.add_metric(labels, worker.waiting)
            steps.add_metric(labels, worker.step)
            if (load := worker.load) is None:
                continue
            moving.add_metric(labels, load.kv_inflight_bytes)
            preempted.add_metric(labels, load.preemptions)
            for state in ("used", "cached", "free"):
                blocks.add_metric([*labels, state], getattr(load, state))
        yield from (up, running, waiting, steps, preempted, moving, blocks)


def _name(role: Role) -> str:
    return role.name.lower()
