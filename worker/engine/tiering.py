"""Moves blocks between the pool and the tiers below it (`worker.tiers`).  On the engine's thread.

Cached blocks are saved in batches beside the steps.  A sequence that could continue from blocks in
a tier waits while they are loaded, if that takes less time than to compute them; other sequences
go on.  Loaded blocks enter the prefix cache, where the sequence finds them like any others.

The blocks that a copy reads or writes are referenced by it, so that nobody else writes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Final

from worker.engine.blocks import BlockPool
from worker.engine.loads import NOTHING, Load
from worker.engine.sequence import Sequence
from worker.tiers.keys import BlockKey, follow
from worker.tiers.store import Found, TierFigures, TierStore

# No more than this part of the blocks is copied at once, because they cannot be evicted meanwhile.
MAX_PART: Final = 4


class Tiering:
    """Saves the blocks of a pool to the tiers of a store, and loads what sequences can use.

    `compute_s` estimates how long it takes to compute so many tokens; None if that is not known.
    """

    def __init__(
        self,
        pool: BlockPool,
        store: TierStore,
        compute_s: Callable[[int], float | None],
        clock: Callable[[], float],
    ) -> None:
        self.pool, self.store = pool, store
        self._compute_s, self._clock = compute_s, clock
        self._saving: Many[int] = ()  # blocks that are being copied to the tiers
        self._loads: dict[bytes, Load] = {}  # under way, by the digest of the first loaded block
        # Cached blocks that were not offered to the tiers yet; the pool adds and removes them.
        self.unsaved: dict[int, BlockKey] = {}
        pool.unsaved = self.unsaved

    @property
    def has_results(self) -> bool:
        return len(self.store.results) > 0

    @property
    def due_s(self) -> float | None:
        """When `collect` has to be called at the latest; None if nothing is awaited."""
        return min((it.due_s for it in self._loads.values() if it.is_awaited), default=None)

    @property
    def tables(self) -> Iterator[Many[int]]:
        """The blocks referenced by the running save and by each load, for `BlockPool.check`."""
        yield self._saving
        yield from (load.blocks for load in self._loads.values())

    def collect(self) -> None:
        """Take the results of copies, and give up loads that are late.

        Their blocks are needed: a disk that hangs may keep a load for ever.
        """
        self.store.results.deliver()
        for load in self._loads.values():
            load.look(self._clock())
            if load.has_stopped:
                self._release(load)
        self.store.is_disk_late = any(load.is_given_up for load in self._loads.values())

    def save(self) -> None:
        """Start to copy cached blocks that a tier lacks, unless others are being copied."""
        if self._saving or not self.unsaved:
            return
        batch, looked_at = list[tuple[BlockKey, int]](), list[int]()
        room = min(self.store.room, max(1, self.pool.num_blocks // MAX_PART))
        for block, key in self.unsaved.items():
            if len(batch) >= room:
                break
            looked_at.append(block)
            if self.store.wants(key):
                batch.append((key, block))
        for block in looked_at:
            del self.unsaved[block]
        if batch:
            self._saving = self.pool.allocate(0, [block for _, block in batch])
            self.store.save(batch, self._end_saving)

    def _end_saving(self) -> None:
        self.pool.free(self._saving)
        self._saving = ()

    def is_awaited(self, sequence: Sequence) -> bool:
        """Return whether a sequence is to wait for a load; start one if that is worth it."""
        if sequence.load is None:
            sequence.load = self._begin(sequence)
        return sequence.load is not None and sequence.load.is_awaited

    def _begin(self, sequence: Sequence) -> Load | None:
        """Return a load of what follows the sequence's cached blocks; None if there is no room."""
        size = self.pool.block_size
        keys = sequence.keys(sequence.max_cached_tokens // size, size)
        cached, prefix = self.pool.match_prefix(keys, root=sequence.root)
        rest = keys[len(cached) :]
        if rest and (known := self._loads.get(follow(prefix, rest[0]).digest)) is not None:
            self.store.use(prefix)
            return known
        found, compute_s = self._worthwhile(self.store.find(prefix, rest))
        if found and not self.pool.can_allocate(len(found), cached):
            return None
        self.store.use(prefix)
        if not found:
            return NOTHING
        blocks = self.pool.allocate(len(found), cached)
        load = Load.start(blocks, self._clock(), compute_s, prefix, found)
        self._loads[found[0].key.digest] = load

        def end() -> None:
            self._release(load)
            load.is_over = True
            del self._loads[found[0].key.digest]

        self.store.load(found, blocks[len(cached) :], load.progress, end)
        return load

    def _worthwhile(self, found: list[Found]) -> tuple[list[Found], float | None]:
        """Return the blocks that take less time to load, and how long it takes to compute them."""
        num_in_memory = next((i for i, it in enumerate(found) if it.kv is None), len(found))
        for part in (found, found[:num_in_memory]):
            compute_s = self._compute_s(len(part) * self.pool.block_size)
            if compute_s is None or self.store.seconds(part) <= compute_s:
                return part, compute_s
        self.store.doubt()
        return [], None

    def _release(self, load: Load) -> None:
        """Put the loaded blocks into the prefix cache and free the others.  Idempotent."""
        if load.blocks:
            prefix = load.prefix
            for it, block in load.loaded:
                prefix = self.pool.register(prefix, it.key.tokens, block)
            self.pool.free(load.blocks)
            load.blocks = ()

    def figures(self) -> TierFigures:
        """Return what the tiers hold; thread-safe."""
        return self.store.figures(self.pool.block_size)

    def close(self, wait_s: float) -> None:
        """Save what is left, for at most `wait_s` seconds, and close the store."""
        until_s = self._clock() + wait_s
        self.collect()
        self.save()
        while (self._saving or not self.store.is_idle) and self._clock() < until_s:
            self.store.results.wait(until_s - self._clock())
            self.collect()
            self.save()
        self.store.close(max(0.0, until_s - self._clock()))
