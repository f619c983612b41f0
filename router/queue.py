"""The requests that wait for a worker with room: by priority, then first come, first served.

A request that does not fit yet keeps those behind it waiting: short prompts of the same priority
do not starve a long one.
"""

from __future__ import annotations

from collections import OrderedDict

from router.flight import Flight


class Queue:
    """Waiting flights; every operation is O(1) in their number."""

    def __init__(self) -> None:
        # At most 201 priorities (wire.options); one without flights has no entry.
        self._by_priority: dict[int, OrderedDict[int, Flight]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, flight: Flight) -> None:
        """Put a flight behind those of its priority."""
        level = self._by_priority.setdefault(flight.request.options.priority, OrderedDict())
        level[flight.handle] = flight
        self._size += 1

    def remove(self, flight: Flight) -> None:
        """Take a flight out; idempotent."""
        priority = flight.request.options.priority
        level = self._by_priority.get(priority)
        if level is None or level.pop(flight.handle, None) is None:
            return
        self._size -= 1
        if not level:
            del self._by_priority[priority]

    def first(self) -> Flight | None:
        """Return the flight whose turn it is, without taking it out."""
        if not self._by_priority:
            return None
        return next(iter(self._by_priority[max(self._by_priority)].values()))

    def is_behind(self, flight: Flight) -> bool:
        """Whether someone who waits comes before this new flight."""
        first = self.first()
        return first is not None and (
            first.request.options.priority >= flight.request.options.priority
        )
