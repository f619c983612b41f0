"""Steps are counted, and percentiles are of the latest ones."""

import pytest

from worker.executor.metrics import WINDOW, Latency, Metrics, Stopwatch


def test_nothing_yet() -> None:
    assert Stopwatch().latency() == Latency(0, 0.0, 0.0, 0.0)


def test_mean_and_percentiles() -> None:
    stopwatch = Stopwatch()
    for milliseconds in range(100, 0, -1):
        stopwatch.add(milliseconds / 1000)
    latency = stopwatch.latency()
    assert (latency.num_steps, latency.p50_s, latency.p95_s) == (100, 0.05, 0.095)
    assert latency.mean_s == pytest.approx(0.0505)


def test_percentiles_forget_what_is_old_and_the_mean_does_not() -> None:
    stopwatch = Stopwatch()
    for _ in range(WINDOW):
        stopwatch.add(3.0)
    for _ in range(WINDOW):
        stopwatch.add(1.0)
    assert stopwatch.latency() == Latency(2 * WINDOW, 2.0, 1.0, 1.0)


def test_all_steps_are_one_kind_or_the_other() -> None:
    prefill, decode = Latency(2, 1.0, 1.0, 1.0), Latency(5, 1.0, 1.0, 1.0)
    assert Metrics(prefill, decode, 1.0, 1.0).num_steps == 7
