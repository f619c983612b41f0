"""Jobs run elsewhere, those that somebody waits for first; their results come back here."""

from __future__ import annotations

import threading

import pytest

from worker.tiers.threads import JobThread, Results

PATIENCE_S = 20.0


def test_results_are_delivered_on_the_thread_that_asks() -> None:
    results, names = Results(), list[str]()
    woken = threading.Event()
    results.wake = woken.set
    thread = JobThread("jobs", results)
    thread.put(lambda: names.append(threading.current_thread().name), lambda _: names.append("me"))
    assert woken.wait(PATIENCE_S) and results.wait(0) and len(results) == 1
    assert names == ["jobs"]
    results.deliver()
    assert names == ["jobs", "me"] and not len(results) and not results.wait(0)
    assert thread.close(PATIENCE_S)


def test_awaited_jobs_pass_others_and_all_run_before_the_end() -> None:
    results, ran, gate = Results(), list[int](), threading.Event()
    thread = JobThread("jobs", results)
    thread.put(lambda: gate.wait(PATIENCE_S), lambda _: None)
    for number in (1, 2):
        thread.put(lambda it=number: ran.append(it), lambda _: None)  # type: ignore[misc]
    thread.put(lambda: ran.append(3), lambda _: None, is_awaited=True)
    assert not thread.close(0.0)
    gate.set()
    assert thread.close(PATIENCE_S) and sorted(ran) == [1, 2, 3] and ran.index(3) < ran.index(2)
    results.deliver()


def test_an_error_is_raised_where_the_result_is_delivered() -> None:
    results = Results()
    thread = JobThread("jobs", results)
    thread.put(lambda: 1 // 0, lambda _: None)
    assert thread.close(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        results.deliver()
