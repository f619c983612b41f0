"""Index of the prefixes that each worker has cached, as far as the router knows.

For each worker it has a set of prefix hashes (`wire.prefix`), at most as many as the worker has
blocks, those of its tiers included, and at most `max_held`; when the set is full, the oldest hash
is dropped.  Heartbeats report stored and evicted blocks.  The blocks of a placed request are added
at once, so that equal prompts match before the next heartbeat.  A wrong entry costs time but never
gives a wrong result: the worker checks its own cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Final

# The most hashes for one worker, whatever its number of blocks: 40 MB of the router's memory.
MAX_HELD: Final = 1 << 18


class PrefixIndex:
    """The prefix hashes that each worker holds."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        # OrderedDict removes the oldest entry in O(1); a dict would scan all removed ones.
        self._held: dict[bytes, OrderedDict[int, None]] = {}
        self._capacity: dict[bytes, int] = {}

    def add(self, identity: bytes, num_blocks: int) -> None:
        """Add a worker with this many blocks, all empty."""
        self._held[identity] = OrderedDict()
        self._capacity[identity] = min(num_blocks, self._max_held)

    def remove(self, identity: bytes) -> Collection[int]:
        """Forget a worker, and return the hashes that it had; idempotent."""
        self._capacity.pop(identity, None)
        return self._held.pop(identity, {})

    def size(self, identity: bytes) -> int:
        """Return the number of hashes kept of a worker."""
        return len(self._held.get(identity, ()))

    def store(self, identity: bytes, hashes: Sequence[int]) -> None:
        """Add blocks of one prompt that the worker has cached, or will have soon."""
        held = self._held.get(identity)
        if held is None:
            return
        # In reverse order, so that the last block is dropped first: a prefix needs its first block.
        held.update(dict.fromkeys(reversed(hashes)))
        for _ in range(len(held) - self._capacity[identity]):
            held.popitem(last=False)

    def evict(self, identity: bytes, hashes: Iterable[int]) -> None:
        """Remove blocks that the worker has evicted."""
        held = self._held.get(identity)
        if held is None:
            return
        for value in hashes:
            held.pop(value, None)

    def matches(self, hashes: Sequence[int]) -> dict[bytes, int]:
        """Return how many leading blocks of a prompt each worker has cached, where not 0."""
        if not hashes:
            return {}
        first = hashes[0]
        return {
            identity: _num_held(held, hashes)
            for identity, held in self._held.items()
            if first in held
        }


def _num_held(held: Container[int], hashes: Sequence[int]) -> int:
    """Return the number of leading blocks in `held`, given that the first one is.

    This is a binary search: workers evict the end of a prefix before its beginning, so a worker
    that has a block is assumed to have all blocks before it.
    """
    low, end = 1, len(hashes)
    while low < end:
        middle = (low + end + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            end = middle - 1
    return low
