"""/metrics: names, base units, bounded labels, and that the numbers are the core's."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics import Metrics
from tests.router.ends import ended
from tests.router.scripted import Router, first, load
from wire.errors import ErrorCode, WireError
from wire.frames import PrefillDone, Role


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def served(router: Router) -> Metrics:
    metrics = Metrics(router.dispatcher)
    router.dispatcher.observers.append(metrics)
    return metrics


def test_a_request_from_beginning_to_end() -> None:
    router = Router()
    metrics = served(router)
    prefill, _ = router.pair()
    router.submit(20, new=0)
    assert samples(metrics)["baton_requests_running"] == 1
    router.now += 0.03
    router.say(prefill, PrefillDone(router.prefill_id(), 0), first(finish_reason="length"))
    found = samples(metrics)
    assert found["baton_requests_running"] == 0
    assert found["baton_requests_total{outcome=length}"] == 1
    assert found["baton_prompt_tokens_total"] == 20
    assert found["baton_generated_tokens_total"] == 1
    assert found["baton_time_to_first_token_seconds_bucket{le=0.02}"] == 0
    assert found["baton_time_to_first_token_seconds_bucket{le=0.04}"] == 1
    assert found["baton_request_seconds_count"] == 1


def test_the_prefill_begins_where_the_queue_ends() -> None:
    metrics = served(Router())
    metrics.on_request_end(ended("stop", queue_s=0.5, ttft_s=0.75))
    metrics.on_request_end(ended("cancelled", queue_s=0.5))
    found = samples(metrics)
    assert found["baton_prefill_seconds_count"] == 1
    assert found["baton_prefill_seconds_sum"] == 0.25


def test_the_transfer() -> None:
    router = Router()
    metrics = served(router)
    metrics.on_request_end(ended("stop", kv_bytes=640, kv_skipped_tokens=16, kv_seconds=0.3))
    metrics.on_request_end(ended("stop", local_reasons=("no_prefill_worker",)))
    found = samples(metrics)
    assert found["baton_kv_transfer_bytes_total"] == 640
    assert found["baton_kv_skipped_tokens_total"] == 16
    assert found["baton_kv_transfer_seconds_sum"] == 0.3
    assert found["baton_kv_transfer_limit_bytes"] == 1 << 20
    assert found["baton_local_prefills_total{reason=no_prefill_worker}"] == 1


def test_a_worker_cannot_invent_labels() -> None:
    router = Router()
    metrics = served(router)
    for word in ("because", "stop", ErrorCode.WORKER_LOST.label):
        metrics.on_request_end(ended(word))
    found = samples(metrics)
    assert found["baton_requests_total{outcome=other}"] == 1
    assert found["baton_requests_total{outcome=worker_lost}"] == 1


def test_workers_and_blocks() -> None:
    router = Router()
    metrics = served(router)
    prefill, decode = router.pair()
    router.beat(decode, load(64, used=3, cached=10, kv_inflight_bytes=5, preemptions=2))
    router.bus.on_lost(prefill)
    found = samples(metrics)
    assert found["baton_workers{role=prefill,state=lost}"] == 1
    assert found["baton_peer_up{rank=0,role=prefill}"] == 0
    assert found["baton_peer_up{rank=0,role=decode}"] == 1
    assert found["baton_workers{role=decode,state=ready}"] == 1
    assert found["baton_workers{role=decode,state=draining}"] == 0
    assert found["baton_blocks{rank=0,role=decode,state=cached}"] == 10
    assert found["baton_kv_inflight_bytes{rank=0,role=decode}"] == 5
    assert found["baton_worker_preemptions_total{rank=0,role=decode}"] == 2
    assert "baton_blocks{rank=0,role=prefill,state=used}" not in found


def test_dropped_frames_and_refused_requests() -> None:
    router = Router()
    metrics = served(router)
    prefill = router.join(Role.PREFILL)
    router.say(prefill, PrefillDone(999, 0), first())
    with pytest.raises(WireError):
        router.submit(0)
    found = samples(metrics)
    assert found["baton_frames_dropped_total{reason=unknown_request}"] == 1
    assert found["baton_requests_rejected_total{code=invalid_request}"] == 1


def test_names_and_units() -> None:
    router = Router()
    metrics = served(router)
    router.pair()
    names = {name.partition("{")[0] for name in samples(metrics)}
    assert all(re.fullmatch(r"baton_[a-z_]+", name) for name in names)
    assert not [name for name in names if re.search(r"_(ms|mb|gb|percent|created)$", name)]


def test_of_several_processes_the_workers_are_there_once() -> None:
    router = Router()
    metrics = served(router)
    router.pair()
    router.submit(20, new=0)
    text = metrics.render([metrics.families(), metrics.families()]).decode()
    assert "baton_requests_running 2.0" in text
    assert text.count('baton_peer_up{rank="0",role="decode"} 1.0') == 1
    assert text.count("# TYPE baton_workers gauge") == 1
    assert sorted(line for line in text.splitlines() if line[0] == "#") == sorted(
        line for line in metrics.render().decode().splitlines() if line[0] == "#"
    )
