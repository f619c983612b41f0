"""The block pool: reference counts and the prefix cache of KV blocks.  It never touches the KV.

Every block is free, used (referenced by sequences), or cached (unreferenced, but in the prefix
cache).  The least recently used cached block is evicted first.

The prefix cache is a trie in one dict: (serial number of the parent, tokens of the block) maps to
the block.  Each cache salt has its own root, with the salt in place of a serial number.  Serial
numbers are never reused, and the salts and tokens themselves are compared, so a hash collision
cannot return the KV of other tokens or of another salt.  Routers identify prefixes by hash
(`wire.prefix`).

A cached block may lack its KV in sliding-window layers (`worker.engine.windows`) or the recurrent
state at its end (`worker.engine.states`).  A chain of blocks is shared only as far as it has all
that the next token needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, islice
from threading import Lock
from typing import Final, NamedTuple, TypeVar

from wire.payloads import MAX_HASHES, Tier
from wire.prefix import root_hash
from worker.engine.states import States
from worker.engine.windows import Windows
from worker.tiers.keys import BlockKey, follow, root_digest


class Prefix(NamedTuple):
    """A chain of `length` full blocks: the serial number of its trie node, and its hash.

    Routers know a chain by its hash (`wire.prefix`), tiers by its digest (`worker.tiers.keys`).
    The empty chain, a root, has the cache salt in place of the number.
    """

    serial: int | str
    hash: int
    digest: bytes
    length: int


def root_of(cache_salt: str) -> Prefix:
    """Return the root of the chains with this salt."""
    return Prefix(cache_salt, root_hash(cache_salt), root_digest(cache_salt), 0)


ROOT: Final = root_of("")
V = TypeVar("V")

# A key of the trie: the serial number of the parent, or the salt, and the tokens of the block.
TrieKey = tuple[int | str, bytes]


class Node(NamedTuple):
    """A block in the trie; its first `num_lacking` tokens have no KV in sliding-window layers."""

    block: int
    prefix: Prefix
    num_lacking: int


class Journal:
    """Prefix hashes that were stored or evicted since the last `read`; opposite changes cancel out.

    Its size is bounded by the number of blocks in the pool and its tiers.  Only the engine's
    thread writes; any thread reads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stored: dict[int, None] = {}
        self._evicted: dict[int, Tier] = {}

    def store(self, prefix_hash: int) -> None:
        with self._lock:
            if self._evicted.pop(prefix_hash, self) is self:
                self._stored[prefix_hash] = None

    def evict(self, prefix_hash: int, tier: Tier = "kv_cache") -> None:
        with self._lock:
            if self._stored.pop(prefix_hash, self) is self:
                self._evicted[prefix_hash] = tier

    def __len__(self) -> int:
        return len(self._stored) + len(self._evicted)

    def read(self) -> tuple[tuple[int, ...], dict[int, Tier]]:
        """Remove and return (stored, evicted), at most `MAX_HASHES` of each, oldest first.

        An evicted hash comes with the tier that had its last block.
        """
        with self._lock:
            return tuple(_drain(self._stored)), _drain(self._evicted)

    def restart(self, hashes: Iterable[int]) -> None:
        """Report these hashes as newly stored, for a reader that has no earlier reports."""
        with self._lock:
            self._stored = dict.fromkeys(hashes)
            self._evicted = {}


def _drain(hashes: dict[int, V]) -> dict[int, V]:
    drained = dict(islice(hashes.items(), MAX_HASHES))
    for prefix_hash in drained:
        del hashes[prefix_hash]
    return drained


class BlockPool:
    """The KV blocks of one worker; `windows` and `states` are None if the model needs none."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        windows: Windows | None = None,
        states: States | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.states, self.windows = states, windows
        self.journal = Journal()
        self.num_used = 0  # blocks referenced by sequences; a shared block counts once
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        # Blocks that are in the trie but unreferenced; the least recently used first.
        self._cached: dict[int, None] = {}
        self._trie: dict[TrieKey, Node] = {}
        self._keys: dict[int, TrieKey] = {}  # by block
        # How many trie nodes and blocks in tiers have each hash.  A block that is recomputed after
        # its parent was evicted gets a second node; the hash is evicted when nothing has it.
        self._num_held = Counter[int]()
        self._serials = count(1)
        # Cached blocks that were not offered to the tiers yet; None without tiers.
        self.unsaved: dict[int, BlockKey] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def is_used(self, block: int) -> bool:
        return self._refs[block] > 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` tokens fits the empty pool."""
        return self.blocks_for(num_tokens) <= self.num_blocks

    def match_prefix(
        self, keys: Sequence[bytes], next_token: int | None = None, root: Prefix = ROOT
    ) -> tuple[list[int], Prefix]:
        """Find the longest cached chain of blocks with these tokens that can be shared.

        Args:
            next_token: The position of the first token to compute, if the KV before it will be
                received; None if that token directly follows the chain.
            root: The root of the chain, which depends on the cache salt.

        Returns:
            The chain's blocks, which the next call of `allocate` must share, and its prefix.
        """
        blocks: list[int] = []
        num_shared, prefix, current = 0, root, root
        whole_from = 0  # sliding-window layers have the KV of all tokens from this position on
        if self.enable_prefix_cache:
            for end, key in enumerate(keys, start=1):
                node = self._trie.get((current.serial, key))
                if node is None:
                    break
                current = node.prefix
                blocks.append(node.block)
                if num_lacking := self._num_lacking(node.block, node.num_lacking):
                    whole_from = (end - 1) * self.block_size + num_lacking
                if self._has_all(node, whole_from, end * self.block_size, next_token):
                    num_shared, prefix = end, current
        return blocks[:num_shared], prefix

    def _has_all(self, node: Node, whole_from: int, end: int, next_token: int | None) -> bool:
        """Return whether a chain of `end` tokens has all KV and state that `next_token` needs."""
        next_token = end if next_token is None else next_token
        if self.states is not None and next_token == end and not self.states.is_kept(node.block):
            return False
        first_seen = 0 if self.windows is None else self.windows.first_seen(next_token)
        return whole_from <= first_seen

    def _num_lacking(self, block: int, num_lacking: int) -> int:
        """Return how many of a block's first tokens have no KV in sliding-window layers."""
        if self.windows is None or self.windows.is_there(block):
            return num_lacking
        return self.block_size

    def can_allocate(self, num_blocks: int, prefix_blocks: Sequence[int] = ()) -> bool:
        """Return whether `num_blocks` fresh blocks are available while sharing `prefix_blocks`."""
        available = len(self._free) + len(self._cached)
        if available < num_blocks or not prefix_blocks:
            return available >= num_blocks
        cached = self._cached
        return available - sum(block in cached for block in prefix_blocks) >= num_blocks

    def allocate(self, num_blocks: int, prefix_blocks: Sequence[int] = ()) -> list[int]:
        """Allocate `num_blocks` fresh blocks; return the shared `prefix_blocks`, then the fresh."""
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

        It starts at the tail, so that the tail is evicted before the head that leads to it.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was freed twice"
            if self._refs[block] == 0:
                self.num_used -= 1
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._release(block)

    def leave(self, blocks: Iterable[int]) -> None:
        """Record that these blocks are no longer in a sequence's sliding window."""
        if self.windows is not None:
            for block in blocks:
                self.windows.leave(block, is_known=block in self._keys)

    def register(
        self,
        parent: Prefix,
        key: bytes,
        block: int,
        *,
        num_lacking: int = 0,
        has_state: bool = False,
    ) -> Prefix:
        """Add a full, computed block to the prefix cache after `parent`; return its prefix.

        If the cache already has a block for this prefix, the new block replaces it only if it has
        more window KV or a state that the cached block lacks, and is worse in neither.
        """
        if not self.enable_prefix_cache:
            self._drop_state(block)
            return ROOT
        trie_key = (parent.serial, key)
        old = self._trie.get(trie_key)
        if old is not None:
            had_state = self.states is not None and self.states.is_kept(old.block)
            old_lacking = self._num_lacking(old.block, old.num_lacking)
            new_lacking = self._num_lacking(block, num_lacking)
            is_worse = new_lacking > old_lacking or (had_state and not has_state)
            is_same = (new_lacking, has_state) == (old_lacking, had_state)
            if is_worse or is_same:
                self._drop_state(block)
            else:
                self._remove(old.block)
                self._insert(trie_key, Node(block, old.prefix, num_lacking), has_state)
            return old.prefix
        name = follow(parent, key)
        prefix = Prefix(next(self._serials), name.hash, name.digest, name.length)
        self._insert(trie_key, Node(block, prefix, num_lacking), has_state)
        self.hold_prefix(prefix.hash)
        if self.unsaved is not None:
            self.unsaved[block] = name
        return prefix

    def hold_prefix(self, prefix_hash: int) -> None:
        """Record that the trie or a tier has one more block with this hash."""
        self._num_held[prefix_hash] += 1
        if self._num_held[prefix_hash] == 1:
            self.journal.store(prefix_hash)

    def drop_prefix(self, prefix_hash: int, tier: Tier = "kv_cache") -> None:
        """Record that the trie, or this tier, has one block less with this hash."""
        self._num_held[prefix_hash] -= 1
        if not self._num_held[prefix_hash]:
            del self._num_held[prefix_hash]
            self.journal.evict(prefix_hash, tier)

    def _insert(self, trie_key: TrieKey, node: Node, has_state: bool) -> None:
        self._trie[trie_key] = node
        self._keys[node.block] = trie_key
        if self.states is not None and has_state:
            self.states.keep(node.block)

    def _remove(self, block: int) -> None:
        """Remove a block from the trie because another block replaces it."""
        del self._keys[block]
        self._drop(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _release(self, block: int) -> None:
        self._drop(block)
        self._free.append(block)

    def _drop(self, block: int) -> None:
        """Drop the state and window KV of a block that is no longer in the prefix cache."""
        if self.unsaved is not None:
            self.unsaved.pop(block, None)
        self._drop_state(block)
        if self.windows is not None:
            self.windows.drop(block)

    def _drop_state(self, block: int) -> None:
        if self.states is not None:
            self.states.drop(block)

    def republish(self) -> None:
        """Re-announce all prefixes here and in tiers, for a router that reconnected."""
        self.journal.restart(self._num_held)

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        prefix = self._trie.pop(self._keys.pop(block)).prefix
        self.drop_prefix(prefix.hash)
        self._release(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert free + used + cached == total, and that `tables` account for every reference."""
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
        if self.states is not None:
            self.states.check()

    def audit(self) -> None:
        """Assert the invariants that `check` relies on; slow, for tests."""
        blocks = [*self._free, *self._cached]
        assert len(set(blocks)) == len(blocks), "a block is in two places"
        assert set(blocks) == {it for it in range(self.num_blocks) if not self.is_used(it)}
        assert self._keys == {node.block: trie_key for trie_key, node in self._trie.items()}
        assert self._cached.keys() <= self._keys.keys() and self._keys.keys().isdisjoint(self._free)
