"""The metrics of `/metrics` again under the names of vLLM, for dashboards and endpoint pickers.

The values are those of the `baton_` metrics; only names and labels change.  Where vLLM has a figure
of one engine, this is that of all workers together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# baton_… -> vllm:…; of a metric with labels, the sum.
NAMES: Final = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "worker_preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "cached_prompt_tokens": ("prefix_cache_hits",),
    "generated_tokens": ("generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    # The second name is that of older releases.
    "inter_token_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_seconds": ("e2e_request_latency_seconds",),
    "queue_seconds": ("request_queue_time_seconds",),
    "prefill_seconds": ("request_prefill_time_seconds",),
    "decode_seconds": ("request_decode_time_seconds",),
    "inference_seconds": ("request_inference_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
}
# Outcomes of requests that vLLM counts as successful, and its name for them.
FINISHED: Final = {"stop": "stop", "length": "length", "cancelled": "abort"}
Samples = Sequence[tuple[dict[str, str], float]]


class WithVllm(Collector):
    """Yields the metrics of `collector`, then those of vLLM that follow from them."""

    def __init__(self, collector: Collector, model: str) -> None:
        self._collector = collector
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        metrics = {
            metric.name.removeprefix("baton_"): metric for metric in self._collector.collect()
        }
        yield from metrics.values()
        for ours, theirs in NAMES.items():
            for name in theirs:
                if ours in metrics:
                    yield self._renamed(metrics[ours], name)
        if "requests" in metrics:
            counts = {it.labels["outcome"]: it.value for it in metrics["requests"].samples}
            reasons = [
                ({"finished_reason": reason}, counts.get(outcome, 0.0))
                for outcome, reason in FINISHED.items()
            ]
            yield self._metric("request_success", metrics["requests"], reasons, "_total")
        blocks = metrics["blocks"]
        total = sum(it.value for it in blocks.samples)
        used = sum(it.value for it in blocks.samples if it.labels["state"] == "used")
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the second one is older
            yield self._metric(name, blocks, [({}, used / total if total else 0.0)])
        yield self._metric("cache_config_info", blocks, [({"num_gpu_blocks": f"{total:.0f}"}, 1.0)])

    def _renamed(self, metric: Metric, name: str) -> Metric:
        """Return the metric of another name, without all labels but those of buckets."""
        values = defaultdict[tuple[str, str | None], float](float)
        for sample in metric.samples:
            values[sample.name.removeprefix(metric.name), sample.labels.get("le")] += sample.value
        renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
        for (suffix, bound), value in values.items():
            labels = self._labels if bound is None else self._labels | {"le": bound}
            renamed.add_sample(f"vllm:{name}{suffix}", labels, value)
        return renamed

    def _metric(self, name: str, like: Metric, samples: Samples, suffix: str = "") -> Metric:
        metric = Metric(f"vllm:{name}", like.documentation, like.type)
        for labels, value in samples:
            metric.add_sample(f"vllm:{name}{suffix}", self._labels | labels, value)
        return metric
