"""The slots view of seed 002: which sequence runs where, and how fast.

A sequence takes the lowest free number when it starts to run and keeps it until it stops running,
so that a line of a display stays with its sequence.  The view is a snapshot that decides nothing.
It may be taken from any thread; a sequence that stops at that very moment is in it or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

from worker.engine.sequence import Sequence


class SlotNumbers:
    """Hands out the lowest number not in use."""

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


class SlotState(StrEnum):
    """What is done for the sequence in a slot."""

    PROCESSING = "processing"  # its prompt is read
    GENERATING = "generating"


@dataclass(frozen=True, slots=True)
class Slot:
    """One running sequence."""

    number: int
    request_id: int
    state: SlotState
    num_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots at one moment: `active` by number, `total` that may be in use at once."""

    active: tuple[Slot, ...]
    total: int

    @classmethod
    def of(cls, running: Iterable[Sequence], total: int, now: float) -> Slots:
        numbered = [(sequence.slot, sequence) for sequence in tuple(running)]
        slots = [_slot(n, sequence, now) for n, sequence in numbered if n is not None]
        return cls(tuple(sorted(slots, key=lambda slot: slot.number)), total)

    @property
    def generating(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.active if slot.state is SlotState.GENERATING)

    @property
    def num_idle(self) -> int:
        return max(0, self.total - len(self.active))

    @property
    def utilization(self) -> float:
        """Slots in use as a share of all, 0 to 1; handed-over sequences may exceed the total."""
        return min(1.0, len(self.active) / self.total)

    @property
    def tokens_per_second(self) -> float:
        """The sum of the rates of all running sequences."""
        return sum(slot.tokens_per_second for slot in self.active)


def _slot(number: int, sequence: Sequence, now: float) -> Slot:
    return Slot(
        number=number,
        request_id=sequence.request_id,
        state=SlotState.GENERATING if sequence.is_decoding else SlotState.PROCESSING,
        num_tokens=sequence.num_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_new_tokens=sequence.num_new_tokens,
        tokens_per_second=sequence.tokens_per_second(now),
    )
