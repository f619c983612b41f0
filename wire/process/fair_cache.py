"""A cache for slow computations that is fair to clients.

A full cache evicts the least recently used result of the client with the most results, so a client
with ever new requests evicts its own results.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from wire.process.fair_threads import FairThreads

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FairCache(Generic[K, V]):
    """A cache of at most `num_kept` Futures by key.  Not thread-safe."""

    def __init__(self, threads: FairThreads, num_kept: int) -> None:
        self._threads = threads
        self._num_kept = num_kept
        # The client is the one that first requested the result.  Ordered by last use, oldest first.
        self._kept: OrderedDict[K, tuple[Hashable, Future[V]]] = OrderedDict()
        self._num_of_client: Counter[Hashable] = Counter()

    def get(self, client: Hashable, key: K, compute: Callable[[], V]) -> Future[V]:
        """Return the result for this key; if it is not cached, submit `compute` to a thread.

        Several callers may share a Future, so cancel it only if no other caller waits for it.
        Raises WireError (OVERLOADED) if too many jobs of this client are queued.
        """
        kept = self._kept.get(key)
        if kept is not None and not kept[1].cancelled():
            self._threads.join(client, kept[1])
            self._kept.move_to_end(key)
            return kept[1]
        future = self._threads.submit(client, compute)
        if kept is not None:
            self._drop(key)
        self._kept[key] = client, future
        self._num_of_client[client] += 1
        if len(self._kept) > self._num_kept:
            most = max(self._num_of_client, key=self._num_of_client.__getitem__)
            self._drop(next(key for key, (owner, _) in self._kept.items() if owner == most))
        return future

    def clear(self) -> None:
        self._kept.clear()
        self._num_of_client.clear()

    def _drop(self, key: K) -> None:
        client, _ = self._kept.pop(key)
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:
            del self._num_of_client[client]
