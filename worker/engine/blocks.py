"""Who owns which KV block, and which blocks hold a prefix worth keeping.  Pure bookkeeping.

Every block is in exactly one place: free, used (some sequence refers to it), or cached (nobody
does, but its full block of tokens may be asked for again; the least recently used goes first).

The prefix cache is a trie in one dict: (serial number of the parent, tokens of the block) leads to
the block.  Serial numbers are never reused and tokens are compared, not hashes, so no collision can
lead to the KV of other tokens.  Each prefix has its hash of `wire.prefix` too: by these hashes the
journal tells routers what the cache holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, islice
from threading import Lock
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from wire.payloads import MAX_HASHES


class Prefix(NamedTuple):
    """A known chain of full blocks: its node in the trie and its hash (`wire.prefix`)."""

    serial: int
    hash: int


ROOT: Final = Prefix(0, 0)

# Where a block is in the trie: the serial number of its parent, and its tokens.
Place = tuple[int, bytes]


class Journal:
    """Prefix hashes stored and evicted since the last reading; not those that were both.

    Bounded by the pool: at most one entry for each block stored, and one for each hash told before.
    The engine's thread writes, any thread reads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stored: dict[int, None] = {}
        self._evicted: dict[int, None] = {}

    def store(self, prefix_hash: int) -> None:
        with self._lock:
            if self._evicted.pop(prefix_hash, self) is self:
                self._stored[prefix_hash] = None

    def evict(self, prefix_hash: int) -> None:
        with self._lock:
            if self._stored.pop(prefix_hash, self) is self:
                self._evicted[prefix_hash] = None

    def __len__(self) -> int:
        """How many hashes are left to tell."""
        return len(self._stored) + len(self._evicted)

    def read(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (stored, evicted), `MAX_HASHES` of each at most, oldest first; forget them."""
        with self._lock:
            return _drain(self._stored), _drain(self._evicted)

    def restart(self, hashes: Iterable[int]) -> None:
        """Tell all these hashes to a reader that knows nothing."""
        with self._lock:
            self._stored = dict.fromkeys(hashes)
            self._evicted = {}


def _drain(hashes: dict[int, None]) -> tuple[int, ...]:
    told = tuple(islice(hashes, MAX_HASHES))
    for prefix_hash in told:
        del hashes[prefix_hash]
    return told


class BlockPool:
    """The blocks of one worker: reference counts, free list, prefix cache."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.journal = Journal()
        self.num_used = 0  # blocks that sequences refer to; a shared one counts once
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # In the trie, but no sequence refers to them; the least recently used first.
        self._cached: dict[int, None] = {}
        self._trie: dict[Place, tuple[int, Prefix]] = {}
        self._keys: dict[int, Place] = {}  # by block
        # How many blocks in the trie have a prefix hash.  Two, when one was computed again behind a
        # parent that was evicted meanwhile: the hash is evicted when both are.
        self._holders = Counter[int]()
        self._serials = count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def is_used(self, block: int) -> bool:
        """Whether a sequence refers to it."""
        return self._refs[block] > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the pool when it is alone."""
        return self.blocks_for(num_tokens) <= self.num_blocks

    def match_prefix(self, keys: Sequence[bytes]) -> tuple[list[int], Prefix]:
        """Find the longest known chain of these blocks of tokens; `allocate` takes them.

        Returns:
            The blocks that hold it, to be passed to `allocate` at once, and its prefix.
        """
        blocks: list[int] = []
        prefix = ROOT
        if self.enable_prefix_cache:
            for key in keys:
                known = self._trie.get((prefix.serial, key))
                if known is None:
                    break
                block, prefix = known
                blocks.append(block)
        return blocks, prefix

    def can_allocate(self, num_blocks: int, prefix_blocks: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` fresh blocks can be had besides sharing `prefix_blocks`."""
        available = len(self._free) + len(self._cached)
        if available < num_blocks or not prefix_blocks:
            return available >= num_blocks
        cached = self._cached
        return available - sum(block in cached for block in prefix_blocks) >= num_blocks

    def allocate(self, num_blocks: int, prefix_blocks: Sequence[int] = ()) -> list[int]:
        """Share `prefix_blocks`, take `num_blocks` fresh ones; return both, in this order."""
        assert self.can_allocate(num_blocks, prefix_blocks)
        for block in prefix_blocks:
            self.num_used += self._refs[block] == 0
            self._refs[block] += 1
            self._cached.pop(block, None)
        while len(self._free) < num_blocks:
            self._evict()
        fresh = [self._free.pop() for _ in range(num_blocks)]
        for block in fresh:
            self._refs[block] = 1
        self.num_used += num_blocks
        return [*prefix_blocks, *fresh]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a chain.

        From the tail: the end of a chain is then evicted before its beginning, without which it
        could not be found.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was freed twice"
            if self._refs[block] == 0:
                self.num_used -= 1
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, parent: Prefix, key: bytes, block: int) -> Prefix:
        """Make a full, computed block findable behind `parent`; return its prefix.

        When another block holds the same tokens behind it already, that one stays findable.
        """
        if not self.enable_prefix_cache:
            return ROOT
        place = (parent.serial, key)
        known = self._trie.get(place)
        if known is not None:
            return known[1]
        prefix = Prefix(next(self._serials), xxh3_64_intdigest(key, parent.hash))
        self._trie[place] = block, prefix
        self._keys[block] = place
        self._holders[prefix.hash] += 1
        if self._holders[prefix.hash] == 1:
            self.journal.store(prefix.hash)
        return prefix

    def republish(self) -> None:
        """Journal every known prefix anew, for a reader that has lost what it was told."""
        self.journal.restart(prefix.hash for _, prefix in self._trie.values())

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        _, prefix = self._trie.pop(self._keys.pop(block))
        self._holders[prefix.hash] -= 1
        if not self._holders[prefix.hash]:
            del self._holders[prefix.hash]
            self.journal.evict(prefix.hash)
        self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert free + used + cached == total and that `tables` explain every reference.

        Takes time in proportion to the tables: little enough for whenever a worker goes idle.
        """
        free, used, cached, total = self.num_free, self.num_used, self.num_cached, self.num_blocks
        assert free + used + cached == total, (
            f"{free} free + {used} used + {cached} cached != {total}"
        )
        references = Counter[int]()
        for table in tables:
            references.update(table)
        for block, refs in references.items():
            assert refs == self._refs[block], (
                f"block {block}: {self._refs[block]} references, not {refs}"
            )
        assert len(references) == used, f"{used} blocks are used, {len(references)} have an owner"

    def audit(self) -> None:
        """Assert what `check` takes for granted; for tests, as it goes through the whole pool."""
        places = [*self._free, *self._cached]
        assert len(set(places)) == len(places), "a block is in two places"
        assert set(places) == {it for it in range(self.num_blocks) if not self.is_used(it)}
        assert self._keys == {block: place for place, (block, _) in self._trie.items()}
        assert self._cached.keys() <= self._keys.keys() and self._keys.keys().isdisjoint(self._free)
