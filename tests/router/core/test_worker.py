from __future__ import annotations

from tests.router.scripted import load, worker
from wire.frames import Role


def test_a_promise_counts_until_a_heartbeat_shows_its_blocks() -> None:
    it = worker(Role.DECODE)
    it.promise(1, 3)
    assert it.available_blocks == 61
    it.on_load(load(64))
    assert it.available_blocks == 61  # Not settled: the blocks are not taken yet.
    it.settle(1)
    it.settle(2)
    it.on_load(load(64, used=3))
    assert it.available_blocks == 61 and not it.promised
    it.unpromise(1)
    assert it.promised_blocks == 0


def test_a_worker_without_a_heartbeat_has_nothing_to_give() -> None:
    it = worker(Role.PREFILL, 4)
    it.load = None
    assert it.available_blocks == 0 and it.name == "prefill-4" and it.is_ready
