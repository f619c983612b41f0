"""A round-robin queue over clients; each client's own items are first in, first out.

A thousand items of one client do not delay the first item of another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[C, T]):
    """A round-robin queue of items by client.  The queue's length does not slow its operations."""

    def __init__(self) -> None:
        # Clients with queued items, in the order in which they will be served.
        self._lines: OrderedDict[C, OrderedDict[T, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def num_of(self, client: C) -> int:
        return len(self._lines.get(client, ()))

    def add(self, client: C, item: T) -> None:
        self._lines.setdefault(client, OrderedDict())[item] = None

    def add_first(self, client: C, item: T) -> None:
        """Insert an item in front of all items of all clients."""
        self.add(client, item)
        self._lines[client].move_to_end(item, last=False)
        self._lines.move_to_end(client, last=False)

    def remove(self, client: C, item: T) -> bool:
        """Remove an item; its client keeps its position.  Return False if it is not queued."""
        line = self._lines.get(client)
        if line is None or item not in line:
            return False
        del line[item]
        if not line:
            del self._lines[client]
        return True

    def end_turn(self, client: C) -> None:
        """Move a client behind all others, after one of its items was served."""
        if client in self._lines:
            self._lines.move_to_end(client)

    def first(self, barred: Collection[C] = ()) -> tuple[C, T] | None:
        """Return the next item and its client, skipping `barred` clients."""
        for client, line in self._lines.items():
            if client not in barred:
                return client, next(iter(line))
        return None

    def last_of(self, client: C) -> T | None:
        """Return the last item of a client, None if it has none."""
        line = self._lines.get(client)
        return None if line is None else next(reversed(line))
