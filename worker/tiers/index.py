"""The index of a tier: which blocks it holds, and which of them to evict.

A block is evicted after those that follow it, since they are found through it.  Among the ends of
chains the one with the lowest value goes first (GreedyDual-Size-Frequency; all blocks have the
same size):

    value = age + uses * cost

`cost` is the time to compute the block again, relative to the first block of a sequence: attention
makes later tokens dearer.  `age` is the value of the last evicted block, so that the value of a
block that is not used falls behind those of newer ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from worker.tiers.keys import BlockKey

Place = TypeVar("Place")


@dataclass(slots=True)
class Entry(Generic[Place]):
    """A block of the tier, and where the tier has it."""

    key: BlockKey
    place: Place
    value: float
    num_uses: int = 1


class Index(Generic[Place]):
    """At most `max_blocks` blocks by digest.

    Args:
        context_blocks: The length of a context whose last token takes twice the time of its first.
    """

    def __init__(self, max_blocks: int, context_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._context_blocks = context_blocks
        self._age = 0.0
        self._entries: dict[bytes, Entry[Place]] = {}
        self._num_next = Counter[bytes]()  # by digest, the number of blocks here that follow it
        # (value, number, digest) of ends of chains; obsolete items are skipped and removed in time.
        self._ends: list[tuple[float, int, bytes]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self.max_blocks

    def get(self, key: BlockKey) -> Place | None:
        """Return where the block with these tokens is, or None."""
        entry = self._entries.get(key.digest)
        return entry.place if entry is not None and entry.key == key else None

    def add(self, key: BlockKey, place: Place) -> None:
        """Add a block that is not in the index; the caller has made room."""
        assert key.digest not in self._entries and not self.is_full
        self._entries[key.digest] = entry = Entry(key, place, 0.0)
        self._num_next[key.parent] += 1
        self._rate(entry)

    def use(self, digest: bytes) -> None:
        """Record that a sequence continues from this block; unknown digests are ignored."""
        if (entry := self._entries.get(digest)) is not None:
            entry.num_uses += 1
            self._rate(entry)

    def remove(self, key: BlockKey) -> Entry[Place]:
        entry = self._entries.pop(key.digest)
        parent = entry.key.parent
        self._num_next[parent] -= 1
        if not self._num_next[parent]:
            del self._num_next[parent]
            if parent in self._entries:
                self._push(self._entries[parent])
        return entry

    def evict(self) -> Entry[Place]:
        """Remove and return the block that is cheapest to lose; the index must not be empty."""
        while True:
            value, _, digest = heappop(self._ends)
            entry = self._entries.get(digest)
            if entry is not None and entry.value == value and not self._num_next[digest]:
                self._age = max(self._age, value)
                return self.remove(entry.key)

    def _rate(self, entry: Entry[Place]) -> None:
        cost = 1 + entry.key.length / self._context_blocks
        entry.value = self._age + entry.num_uses * cost
        if not self._num_next[entry.key.digest]:
            self._push(entry)

    def _push(self, entry: Entry[Place]) -> None:
        self._num_pushed += 1
        heappush(self._ends, (entry.value, self._num_pushed, entry.key.digest))
        if len(self._ends) > 2 * len(self._entries) + 64:
            entries = self._entries.items()
            ends = ((digest, it) for digest, it in entries if not self._num_next[digest])
            self._ends = [(it.value, number, digest) for number, (digest, it) in enumerate(ends)]
            heapify(self._ends)
