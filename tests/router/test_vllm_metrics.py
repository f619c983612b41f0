"""The metrics under vLLM's names are those under ours."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.metrics import Metrics
from router.vllm_metrics import NAMES
from tests.router.scripted import Router, first, load
from wire.errors import ErrorCode
from wire.frames import PrefillDone

LABELS = (("engine", "0"), ("model_name", "demo"))


def scrape(metrics: Metrics, *, merged: bool = False) -> dict[tuple[str, ...], float]:
    """(name, other labels…) -> value, of vLLM's names."""
    processes = [metrics.families(), metrics.families()] if merged else None
    found = {}
    for family in text_string_to_metric_families(metrics.render(processes).decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert tuple((name, labels.pop(name)) for name, _ in LABELS) == LABELS
                found[(sample.name.removeprefix("vllm:"), *labels.values())] = sample.value
    return found


def test_values_are_those_of_our_metrics() -> None:
    router = Router()
    metrics = Metrics(router.dispatcher, vllm_model="demo")
    router.dispatcher.observers.append(metrics)
    prefill, decode = router.pair()
    router.beat(prefill, load(64, used=4, preemptions=2))
    router.beat(decode, load(64, used=12, cached=20, preemptions=3))
    handle, _ = router.submit(20, new=3)
    assert scrape(metrics)["num_requests_running",] == 1
    router.dispatcher.cancel(handle, ErrorCode.CANCELLED)
    router.sent.clear()
    router.submit(20, new=0)
    request_id = router.prefill_id()
    router.now += 0.03
    router.say(prefill, PrefillDone(request_id, 0), first(7, "length"))
    found = scrape(metrics)
    assert found["num_requests_running",] == found["num_requests_waiting",] == 0
    assert found["kv_cache_usage_perc",] == found["gpu_cache_usage_perc",] == 0.125
    assert found["cache_config_info", "128"] == 1
    assert found["num_preemptions_total",] == 5
    assert found["prompt_tokens_total",] == found["prefix_cache_queries_total",] == 40
    assert found["generation_tokens_total",] == 1
    assert found["request_success_total", "length"] == found["request_success_total", "abort"] == 1
    assert found["time_to_first_token_seconds_bucket", "0.04"] == 1
    assert found["e2e_request_latency_seconds_count",] == 2
    assert found["request_prompt_tokens_sum",] == 40
    names = {name for names in NAMES.values() for name in names}
    missing = {name for name in names if not any(it[0].startswith(name) for it in found)}
    assert not missing
    # Of several processes: once each, counters and histograms as their sum.
    merged = scrape(metrics, merged=True)
    assert merged["prompt_tokens_total",] == 80 and merged["num_preemptions_total",] == 5


def test_they_can_be_left_out() -> None:
    router = Router()
    assert not scrape(Metrics(router.dispatcher))
