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
        place = bisect_left(entries, (chain,))
        left, right = entries[max(0, place - MAX_TIES) : place], entries[place : place + MAX_TIES]
        best = max(_common(chain, each[0]) for each in (*left[-1:], *right[:1]))
        prefix = chain[: best * TOKEN_BYTES]
        ties = [record for each, _, record in (*left, *right) if each.startswith(prefix)]
        return _match(max(ties, key=lambda each: _preference(each, salt)), best, salt)

    def add(self, record: Record, chain: bytes) -> None:
        """Store the chain of a record, in place of an earlier one, and drop others if needed."""
        self.remove(record)
        record.chain = chain
        size = record.size + BYTES_EACH
        if size > self._max_bytes:
            record.chain = record.outline = None
            return
        while self.num_bytes + size > self._max_bytes:
            self.remove(self._next_to_drop(record.client, size), forget=True)
        insort(self._sorted.setdefault(record.client, []), (chain, record.number, record))
        self._by_age[record.number] = record
        self._of_client.setdefault(record.client, OrderedDict())[record.number] = record
        self._count(record.client, size)

    def remove(self, record: Record, *, forget: bool = False) -> None:
        """Stop comparing prompts with a record; `forget` also drops its tokens.  Idempotent."""
        if self._by_age.pop(record.number, None) is not None:
            assert record.chain is not None
            entries = self._sorted[record.client]
            del entries[bisect_left(entries, (record.chain, record.number))]
            del self._of_client[record.client][record.number]
            self._count(record.client, -record.size - BYTES_EACH)
        if forget:
            record.chain = record.outline = None

    def _next_to_drop(self, client: str, size: int) -> Record:
        share = self._max_bytes / (len(self._bytes_of) + (client not in self._bytes_of))
        own = self._of_client.get(client)
        is_over = own and self._bytes_of[client] + size > share
        oldest = own if own and is_over else self._by_age
        return next(iter(oldest.values()))

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[client] += num_bytes
        if not self._sorted[client]:
            del self._sorted[client], self._of_client[client], self._bytes_of[client]


def _preference(record: Record, salt: str) -> tuple[bool, bool, int]:
    return record.salt == salt, not record.is_in_flight, record.number


def _match(record: Record, num_common: int, salt: str) -> Match:
    assert record.chain is not None
    num_tokens = len(record.chain) // TOKEN_BYTES
    has_answer = num_tokens > record.num_tokens
    return Match(
        tokens=num_common,
        # The last token of an answer is not read by any worker.
        usable=min(num_common, num_tokens - has_answer),
        is_whole=num_common == num_tokens,
        is_in_flight=record.is_in_flight,
        has_other_salt=record.salt != salt,
        earlier=record.name,
        ended_at=None if record.end is None else record.submitted_at + record.end.total_s,
        prefiller=record.prefiller,
    )


def _common(one: bytes, other: bytes) -> int:
    """Return how many leading tokens of two chains are equal, by binary search."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    if one.startswith(other) or other.startswith(one):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
