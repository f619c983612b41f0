"""Lost blocks are remembered, up to a limit."""

from __future__ import annotations

from router.core.history.losses import MAX_LOST_WORKERS, Losses
from router.core.history.record import Loss
from tests.router.scripted import worker
from wire.frames import Role

P0, P1 = worker(Role.PREFILL, 0), worker(Role.PREFILL, 1)


def test_the_latest_loss_of_a_block_is_told() -> None:
    losses = Losses()
    assert losses.latest(5) is None
    losses.on_evicted(P0, [5, 6], "host", 1.0)
    losses.on_lost(P1, {5: None}, 2.0)
    assert losses.latest(5) == Loss("prefill-1", 2.0, tier=None)
    assert losses.latest(6) == Loss("prefill-0", 1.0, tier="host")
    losses.on_evicted(P1, [5], "disk", 3.0)
    assert losses.latest(5) == Loss("prefill-1", 3.0, tier="disk")


def test_the_oldest_are_forgotten() -> None:
    losses = Losses(max_evicted=3, max_of_lost=4)
    losses.on_evicted(P0, [1, 2, 3], "host", 1.0)
    losses.on_evicted(P0, [1, 4], "host", 2.0)
    assert [value for value in range(6) if losses.latest(value)] == [1, 3, 4]
    losses.on_lost(P0, {11: None, 12: None}, 3.0)
    losses.on_lost(P1, {13: None, 14: None, 15: None}, 4.0)
    assert losses.latest(11) is None and losses.latest(13) is not None
    losses.on_lost(P0, {16: None}, 5.0)
    assert losses.latest(13) is not None and losses.latest(16) is not None
    for number in range(MAX_LOST_WORKERS):
        losses.on_lost(P0, {}, 5.0 + number)
    assert losses.latest(13) is None
