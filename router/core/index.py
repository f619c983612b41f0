"""Which decode worker holds the KV of which prefix, as far as the router knows.

Per worker a set of prefix hashes (`wire.prefix`) in least-recently-used order, never more than the
worker has blocks, or `max_held`.  Fed by what heartbeats say was stored and evicted, and at
placement by what is about to be stored, so that requests in one heartbeat's time already find each
other.  It is a hint: a wrong entry costs a transfer, never a wrong answer, since the decode worker
itself says what it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

# Of one worker, whatever it says it has: 40 MB of the router's memory.
MAX_HELD: Final = 1 << 18


class PrefixIndex:
    """Prefix hashes by worker identity."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._held: dict[bytes, OrderedDict[int, None]] = {}
        self._capacity: dict[bytes, int] = {}

    def add(self, identity: bytes, num_blocks: int) -> None:
        """Start knowing a worker with this many blocks, holding nothing yet."""
        self._held[identity] = OrderedDict()
        self._capacity[identity] = min(num_blocks, self._max_held)

    def remove(self, identity: bytes) -> None:
        """Forget a worker; idempotent."""
        self._held.pop(identity, None)
        self._capacity.pop(identity, None)

    def size(self, identity: bytes) -> int:
        """Hashes known of a worker, never over its number of blocks."""
        return len(self._held.get(identity, ()))

    def store(self, identity: bytes, hashes: Sequence[int]) -> None:
        """The worker holds these blocks, or will soon; chains run from their first block on."""
        held = self._held.get(identity)
        if held is None:
            return
        # Backwards, so that a chain loses its tail first: without its head the rest is worthless.
        for value in reversed(hashes):
            held[value] = None
            held.move_to_end(value)
        for _ in range(len(held) - self._capacity[identity]):
            held.popitem(last=False)

    def evict(self, identity: bytes, hashes: Iterable[int]) -> None:
        """The worker gave these blocks up."""
        held = self._held.get(identity)
        if held is None:
            return
        for value in hashes:
            held.pop(value, None)

    def longest(self, identity: bytes, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of this chain the worker holds."""
        held = self._held.get(identity)
        if not held:
            return 0
        for count, value in enumerate(hashes):
            if value not in held:
                return count
        return len(hashes)
