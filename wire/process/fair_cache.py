"""A cache of slow results: each is computed once and kept while there is room.

A full cache evicts the least recently used result of the client that has the most, so a client with
ever new requests evicts its own results.
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
    """The Futures of results by key, `num_kept` at most; used by one thread only."""

    def __init__(self, threads: FairThreads, num_kept: int) -> None:
        self._threads = threads
        self._num_kept = num_kept
        # Each with its first client, the least recently used first.
        self._kept: OrderedDict[K, tuple[Hashable, Future[V]]] = OrderedDict()
        self._num_of_client: Counter[Hashable] = Counter()

    def get(self, client: Hashable, key: K, compute: Callable[[], V]) -> Future[V]:
        """Return the result under this key, computed by a thread if it is not known.

        The Future may be that of others: cancel it only if nobody else waits for it.  Raises
        WireError: OVERLOADED; too much work of this client waits.
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
        """Forget all of them."""
        self._kept.clear()
        self._num_of_client.clear()

    def _drop(self, key: K) -> None:
        client, _ = self._kept.pop(key)
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:
            del self._num_of_client[client]
