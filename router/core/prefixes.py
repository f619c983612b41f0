"""The prefixes whose KV each worker holds, as far as the router knows.

Each worker has a set of prefix hashes (`wire.prefix`), at most as many as it has blocks, or
`max_held`; the oldest go first.  Heartbeats report stored and evicted blocks; the blocks of a
placed request are added at once, for equal prompts before the next heartbeat.  A wrong entry costs
a transfer or a reading, never a wrong answer: the worker itself says what it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final

# Hashes kept per worker, however many blocks it claims: 40 MB of the router's memory.
MAX_HELD: Final = 1 << 18


class PrefixIndex:
    """The prefix hashes that each worker holds."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        # OrderedDict: finding the oldest in a dict would pass over all that were dropped before.
        self._held: dict[bytes, OrderedDict[int, None]] = {}
        self._capacity: dict[bytes, int] = {}

    def add(self, identity: bytes, num_blocks: int) -> None:
        """Add a worker with this many blocks, all empty."""
        self._held[identity] = OrderedDict()
        self._capacity[identity] = min(num_blocks, self._max_held)

    def remove(self, identity: bytes) -> None:
        """Forget a worker; idempotent."""
        self._held.pop(identity, None)
        self._capacity.pop(identity, None)

    def size(self, identity: bytes) -> int:
        """Return the number of hashes kept of a worker."""
        return len(self._held.get(identity, ()))

    def store(self, identity: bytes, hashes: Sequence[int]) -> None:
        """Note that the worker holds these blocks of one prompt, or will soon."""
        held = self._held.get(identity)
        if held is None:
            return
        # Backwards, so that the last block is dropped first: without the first, none is usable.
        held.update(dict.fromkeys(reversed(hashes)))
        for _ in range(len(held) - self._capacity[identity]):
            held.popitem(last=False)

    def evict(self, identity: bytes, hashes: Iterable[int]) -> None:
        """Note that the worker has evicted these blocks."""
        held = self._held.get(identity)
        if held is None:
            return
        for value in hashes:
            held.pop(value, None)

    def matches(self, hashes: Sequence[int]) -> dict[bytes, int]:
        """Return how many leading blocks of a prompt each worker holds, if it holds any."""
        if not hashes:
            return {}
        first = hashes[0]
        return {
            identity: _num_held(held, hashes)
            for identity, held in self._held.items()
            if first in held
        }


def _num_held(held: Container[int], hashes: Sequence[int]) -> int:
    """Return the number of leading blocks held, of which there is one at least.

    A binary search: workers evict the end of a prefix before its beginning, so one that holds a
    block is taken to hold those before it.
    """
    low, end = 1, len(hashes)
    while low < end:
        middle = (low + end + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            end = middle - 1
    return low
