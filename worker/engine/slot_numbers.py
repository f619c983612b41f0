"""Numbers of running sequences, for displays and metrics."""

from __future__ import annotations

from heapq import heappop, heappush


class SlotNumbers:
    """Allocates the lowest number not in use, so that a display keeps one line per sequence."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        heappush(self._free, number)
