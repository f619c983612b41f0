"""Finds sequences past their deadline; the caller passes the current time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from worker.engine.sequence import Sequence

# The heap is rebuilt when it has this many entries more than twice the number of live sequences.
_SLACK: Final = 64


class Deadlines:
    """A heap of deadlines; the entries of ended sequences are removed lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Track a sequence, if it has a deadline."""
        if sequence.deadline_s is not None:
            self._sequences[sequence.request_id] = sequence
            heappush(self._heap, (sequence.deadline_s, sequence.request_id))

    def remove(self, sequence: Sequence) -> None:
        """Stop tracking a sequence; ignore one that is not tracked."""
        if self._sequences.pop(sequence.request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._sequences) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    @property
    def next_s(self) -> float | None:
        """The earliest deadline, or None if no sequence has one."""
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_overdue(self, now: float) -> list[Sequence]:
        """Remove and return the sequences past their deadline, earliest first."""
        overdue: list[Sequence] = []
        while (next_s := self.next_s) is not None and next_s <= now:
            overdue.append(self._sequences.pop(heappop(self._heap)[1]))
        return overdue

    def _is_current(self, entry: tuple[float, int]) -> bool:
        deadline_s, request_id = entry
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.deadline_s == deadline_s
