"""The prefixes whose KV each worker holds, as far as the router knows.

Each worker has a set of prefix hashes (`wire.prefix`) in LRU order, at most as many as it has
blocks, or `max_held`.  Heartbeats report stored and evicted blocks; the blocks of a placed request
are added at once, for equal prompts before the next heartbeat.  A wrong entry costs a transfer or a
reading, never a wrong answer: the worker itself says what it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

# Hashes kept per worker, however many blocks it claims: 40 MB of the router's memory.
MAX_HELD: Final = 1 << 18


class PrefixIndex:
    """Which worker holds which blocks: for each hash, a bit mask of workers."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._held: dict[bytes, OrderedDict[int, None]] = {}
        self._capacity: dict[bytes, int] = {}
        self._bits: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}  # by bit
        self._holders: dict[int, int] = {}  # by hash, the sum of the bits of its holders

    def add(self, identity: bytes, num_blocks: int) -> None:
        """Add a worker with this many blocks, all empty."""
        self.remove(identity)
        bit = 1
        while bit in self._identities:
            bit <<= 1
        self._bits[identity], self._identities[bit] = bit, identity
        self._held[identity] = OrderedDict()
        self._capacity[identity] = min(num_blocks, self._max_held)

    def remove(self, identity: bytes) -> None:
        """Forget a worker; idempotent."""
        self.evict(identity, list(self._held.get(identity, ())))
        if (bit := self._bits.pop(identity, None)) is not None:
            del self._identities[bit], self._held[identity], self._capacity[identity]

    def size(self, identity: bytes) -> int:
        """Return the number of hashes kept of a worker."""
        return len(self._held.get(identity, ()))

    def store(self, identity: bytes, hashes: Sequence[int]) -> None:
        """Note that the worker holds these blocks of one prompt, or will soon."""
        held = self._held.get(identity)
        if held is None:
            return
        bit, holders = self._bits[identity], self._holders
        # Backwards, so that the last block is evicted first: without the first, none is usable.
        for value in reversed(hashes):
            if value in held:
                held.move_to_end(value)
            else:
                held[value] = None
                holders[value] = holders.get(value, 0) | bit
        if (too_many := len(held) - self._capacity[identity]) > 0:
            self.evict(identity, list(islice(held, too_many)))

    def evict(self, identity: bytes, hashes: Iterable[int]) -> None:
        """Note that the worker has evicted these blocks."""
        held = self._held.get(identity)
        if held is None:
            return
        bit, holders = self._bits[identity], self._holders
        for value in hashes:
            if held.pop(value, self) is None:
                holders[value] ^= bit
                if not holders[value]:
                    del holders[value]

    def matches(self, hashes: Sequence[int]) -> dict[bytes, int]:
        """Return how many leading blocks of a prompt each worker holds, if it holds any.

        A binary search: workers evict the end of a prefix before its beginning, so one that holds a
        block is taken to hold those before it.
        """
        found: dict[bytes, int] = {}
        if not hashes:
            return found
        holders = self._holders
        # (workers that hold block `low`, low, the first block that they are known to lack)
        groups = [(holders.get(hashes[0], 0), 0, len(hashes))]
        while groups:
            workers, low, end = groups.pop()
            if end - low > 1:
                middle = (low + end) // 2
                deeper = workers & holders.get(hashes[middle], 0)
                groups += [(deeper, middle, end)] if deeper else []
                groups += [(workers ^ deeper, low, middle)] if workers != deeper else []
                continue
            while workers:
                bit = workers & -workers
                found[self._identities[bit]] = low + 1
                workers ^= bit
        return found
