"""Remembers which blocks workers have evicted, and which they had when they were lost."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from router.core.fleet import Worker
from router.core.history.record import Loss
from wire.payloads import Tier

# Evicted blocks, and blocks of lost workers: about 10 and 40 MB.
MAX_EVICTED: Final = 1 << 16
MAX_OF_LOST: Final = 1 << 18
MAX_LOST_WORKERS: Final = 64


class _LostWorker(NamedTuple):
    name: str
    at: float
    hashes: Collection[int]


class Losses:
    """The latest losses; times are on the core's clock."""

    def __init__(self, max_evicted: int = MAX_EVICTED, max_of_lost: int = MAX_OF_LOST) -> None:
        self._max_evicted = max_evicted
        self._max_of_lost = max_of_lost
        self._evicted: OrderedDict[int, Loss] = OrderedDict()
        self._lost: deque[_LostWorker] = deque()
        self._num_of_lost = 0

    def on_evicted(self, worker: Worker, hashes: Iterable[int], tier: Tier, now: float) -> None:
        """Record that a worker reported these blocks as evicted, the last of them from `tier`."""
        loss = Loss(worker.name, now, tier)
        for value in hashes:
            self._evicted[value] = loss
            self._evicted.move_to_end(value)
        for _ in range(len(self._evicted) - self._max_evicted):
            self._evicted.popitem(last=False)

    def on_lost(self, worker: Worker, hashes: Collection[int], now: float) -> None:
        """Record that a worker is gone, with all these blocks; `hashes` is kept, not copied."""
        self._lost.append(_LostWorker(worker.name, now, hashes))
        self._num_of_lost += len(hashes)
        # The latest worker is kept whatever its size, which the index of prefixes bounds.
        while len(self._lost) > 1 and (
            self._num_of_lost > self._max_of_lost or len(self._lost) > MAX_LOST_WORKERS
        ):
            self._num_of_lost -= len(self._lost.popleft().hashes)

    def latest(self, prefix_hash: int) -> Loss | None:
        """Return the last loss of a block, if it is remembered."""
        loss = self._evicted.get(prefix_hash)
        for name, at, hashes in self._lost:
            if prefix_hash in hashes and (loss is None or loss.at <= at):
                loss = Loss(name, at, tier=None)
        return loss
