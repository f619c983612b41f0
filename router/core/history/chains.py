"""The tokens of recent requests, by client, for finding the longest common prefix.

A chain is the tokens of a prompt, later with those of its answer, as little-endian u32.  The chains
of a client are sorted as bytes, so the one with the longest common prefix is next to the place
where a prompt would be inserted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from typing import Final

from router.core.history.record import Match, Record

TOKEN_BYTES: Final = 4
# Neighbours on each side to compare, where several share the longest prefix.
MAX_TIES: Final = 4
# Shorter ranges are compared as numbers, longer ones by halves.
XOR_BYTES: Final = 256
# Approximate overhead of a chain in bytes.
BYTES_EACH: Final = 256

# The number of the record makes entries with equal chains different.
Entry = tuple[bytes, int, Record]


class Chains:
    """The chains of all clients, up to `max_bytes` in total.

    A client that has more than an equal share of the bytes loses its own oldest chain when there
    is no room for its next one; other clients cause the loss of the oldest chain of all.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._sorted: dict[str, list[Entry]] = {}
        self._by_age: OrderedDict[int, Record] = OrderedDict()
        self._of_client: dict[str, OrderedDict[int, Record]] = {}
        self._bytes_of: Counter[str] = Counter()

    def nearest(self, client: str, chain: bytes, salt: str) -> Match | None:
        """Return the earlier request of the client with the longest common prefix, if any.

        Of several, one with the same salt is preferred, then one whose prompt has been read, then
        the latest.
        """
        entries = self._sorted.get(client)
        if not entries:
            return None
        # The longest common prefix is with one of the two neighbours.
        place = bisect_left(entries, (chain,))
        best = _common(chain, entries[place - 1][0]) if place else 0
        if place < len(entries) and entries[place][0].startswith(chain[: (best + 1) * TOKEN_BYTES]):
            best = _common(chain, entries[place][0])
        # Other entries with that prefix are beside them.
        prefix = chain[: best * TOKEN_BYTES]
        start = end = place
        while 0 < start and place - start < MAX_TIES and entries[start - 1][0].startswith(prefix):
            start -= 1
        limit = min(len(entries), place + MAX_TIES)
        while end < limit and entries[end][0].startswith(prefix):
            end += 1
        ties = entries[start:end]
        if len(ties) > 1:
            ties.sort(key=lambda each: (each[2].salt == salt, not each[2].is_in_flight, each[1]))
        found, _, record = ties[-1]
        return Match(record, best, len(found) // TOKEN_BYTES, record.is_in_flight)

    def add(self, record: Record, chain: bytes) -> None:
        """Store the chain of a new record, and drop others if needed."""
        record.chain = chain
        size = record.size + BYTES_EACH
        if size > self._max_bytes:
            record.chain = record.outline = record.options = None
            return
        while self.num_bytes + size > self._max_bytes:
            self.drop(self._next_to_drop(record.client, size))
        client, number = record.client, record.number
        insort(self._sorted.setdefault(client, []), (chain, number, record))
        self._by_age[number] = record
        self._of_client.setdefault(client, OrderedDict())[number] = record
        self._count(client, size)

    def extend(self, record: Record, answer: bytes) -> None:
        """Append the tokens of the answer to the chain of a record, if it is still stored."""
        if record.number not in self._by_age or record.chain is None:
            return
        entries = self._sorted[record.client]
        del entries[bisect_left(entries, (record.chain, record.number))]
        record.chain += answer
        insort(entries, (record.chain, record.number, record))
        self._count(record.client, len(answer))
        while self.num_bytes > self._max_bytes:
            self.drop(self._next_to_drop(record.client, 0))

    def drop(self, record: Record) -> None:
        """Forget the tokens of a record.  Idempotent."""
        if self._by_age.pop(record.number, None) is not None:
            assert record.chain is not None
            entries = self._sorted[record.client]
            del entries[bisect_left(entries, (record.chain, record.number))]
            del self._of_client[record.client][record.number]
            self._count(record.client, -record.size - BYTES_EACH)
        record.chain = record.outline = record.options = None

    def _next_to_drop(self, client: str, size: int) -> Record:
        share = self._max_bytes / len(self._bytes_of)
        own = self._of_client.get(client)
        is_over = own and self._bytes_of[client] + size > share
        oldest = own if own and is_over else self._by_age
        return next(iter(oldest.values()))

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[client] += num_bytes
        if not self._sorted[client]:
            del self._sorted[client], self._of_client[client], self._bytes_of[client]


def _common(one: bytes, other: bytes) -> int:
    """Return how many leading tokens of two chains are equal."""
    low, high = 0, min(len(one), len(other))
    while high - low > XOR_BYTES:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    differing = int.from_bytes(one[low:high], "little") ^ int.from_bytes(other[low:high], "little")
    if not differing:
        return high // TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return (low + lowest_bit // 8) // TOKEN_BYTES
