"""Series of several processes: what is added, what is not, and what stays of one that died."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.processes.merged_metrics import Families, Series, families, summed, without_gauges


def process(requests: int, running: int, lag_s: float) -> Families:
    registry = CollectorRegistry()
    counter = Counter("baton_requests", "Ends.", ["outcome"], registry=registry)
    counter.labels("stop").inc(requests)
    if requests > 1:
        counter.labels("length").inc()
    Gauge("baton_requests_running", "Now.", registry=registry).set(running)
    Gauge("baton_event_loop_lag_seconds", "Lag.", registry=registry).set(lag_s)
    histogram = Histogram("baton_request_seconds", "Time.", buckets=(1, 2), registry=registry)
    histogram.observe(requests)
    return families(registry.collect())


def shown(of: Families) -> dict[str, float]:
    text = generate_latest(Series(of, [])).decode()
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
    found = {name: float(value) for name, value in rows if "_created" not in name}
    assert len(found) == len([name for name, _ in rows if "_created" not in name])
    return found


def test_each_series_is_there_once() -> None:
    assert shown(summed([process(1, 3, 0.5), process(2, 4, 0.25)])) == {
        'baton_requests_total{outcome="stop"}': 3,
        'baton_requests_total{outcome="length"}': 1,
        "baton_requests_running": 7,
        "baton_event_loop_lag_seconds": 0.5,
        'baton_request_seconds_bucket{le="1.0"}': 1,
        'baton_request_seconds_bucket{le="2.0"}': 2,
        'baton_request_seconds_bucket{le="+Inf"}': 2,
        "baton_request_seconds_count": 2,
        "baton_request_seconds_sum": 3,
    }


def test_no_counter_falls_when_a_process_dies() -> None:
    one, other = process(5, 3, 0.1), process(2, 4, 0.1)
    before, after = shown(summed([one, other])), shown(summed([without_gauges(one), other]))
    gauges = {"baton_requests_running", "baton_event_loop_lag_seconds"}
    assert {name for name in before if before[name] != after.get(name)} == gauges - {
        "baton_event_loop_lag_seconds"
    }
    assert after["baton_requests_running"] == 4
    assert summed([without_gauges(one)]) == without_gauges(one)
