"""Sequences wait for a load as long as it gets on, and no longer than computing would take."""

from __future__ import annotations

import pytest

from worker.engine.loads import GRACE_S, NOTHING, STALL_S, Load


def test_a_load_that_gets_on_is_awaited() -> None:
    load = Load(due_s=STALL_S)
    for second in range(1, 9):
        load.progress.num_loaded += 1
        load.look(second * STALL_S)
        load.look(second * STALL_S)
        assert load.is_awaited and load.due_s == (second + 1) * STALL_S
    load.is_over = True
    assert not load.is_awaited and not NOTHING.is_awaited


def test_a_load_that_is_stuck_is_stopped() -> None:
    load = Load(due_s=STALL_S)
    load.look(STALL_S - 0.1)
    assert load.is_awaited
    load.look(STALL_S)
    assert load.is_given_up and load.progress.is_stopped and not load.is_awaited
    with load.progress.lock:
        assert not load.has_stopped, "a block is being written"
    assert load.has_stopped


def test_a_load_that_takes_longer_than_computing_is_stopped() -> None:
    for compute_s in (0.0, 0.5, 5.5 * STALL_S):
        load = Load.start((1, 2), 100.0, compute_s)
        while load.is_awaited:
            load.progress.num_loaded += 1
            now = load.due_s
            load.look(now)
        assert now == pytest.approx(100.0 + compute_s + GRACE_S)
    assert Load.start((), 100.0, None).due_s == 100.0 + STALL_S
