"""The tiers below a block pool: host memory, and a disk.  Called on the engine's thread.

Blocks are copied to the tiers soon after they are computed, by threads beside the steps: off the
device into host memory, and from there to the disk.  They are read back into new blocks of the
pool when a sequence can continue from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, NamedTuple

import structlog

from wire.parts import Buffer
from wire.payloads import TierLoad
from worker.tiers.copies import BlockCopies, Rate
from worker.tiers.disk import Slot
from worker.tiers.disk_tier import DiskTier, HeldPrefixes, Thread
from worker.tiers.index import Index
from worker.tiers.keys import BlockKey, Chain, follow
from worker.tiers.threads import Results

# Bytes that one call of `save` copies: about what a step computes, since there is one call a step.
COPY_BYTES: Final = 128 << 20

log = structlog.get_logger("worker")


class Found(NamedTuple):
    """A block in a tier: its KV in host memory, or the slot of the disk that has it."""

    key: BlockKey
    kv: Buffer | None
    slot: Slot | None


@dataclass(slots=True)
class Progress:
    """How far a load is; it writes no further block if `is_stopped` is set.

    The thread that reads holds the lock while it writes to a block of the pool.
    """

    num_loaded: int = 0
    is_stopped: bool = False
    lock: Lock = field(default_factory=Lock)


class TierFigures(NamedTuple):
    """The content of the tiers, and failures since the start.

    `failures` are "write" and "read" errors of the disk (damaged blocks are read errors), and
    "skipped" blocks that were not written because the disk was too slow or failed.
    """

    host: TierLoad
    disk: TierLoad
    failures: dict[str, int]

    @property
    def tiers(self) -> dict[str, TierLoad]:
        """The tiers that there are, by name."""
        both = {"host": self.host, "disk": self.disk}
        return {name: tier for name, tier in both.items() if tier.max_blocks}


@dataclass(slots=True)
class _Read:
    """The outcome of a load: how many blocks were read, in order, and what each tier took."""

    num_blocks: int = 0
    host_s: float = 0.0
    disk_s: float = 0.0
    is_damaged: bool = False  # the block after them could not be read


class TierStore:
    """Blocks in host memory, at most `host_bytes`, and on the `disk`, if there is one."""

    def __init__(
        self,
        copies: BlockCopies,
        host_bytes: int,
        disk: DiskTier | None,
        copying: Thread,
        results: Results,
        prefixes: HeldPrefixes,
        *,
        context_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self.results = results
        self.disk = disk
        self.is_disk_late = False  # a load from it takes longer than computing would
        self.copies, self._copying = copies, copying
        self._prefixes, self._clock = prefixes, clock
        self._host = Index[Buffer](host_bytes // copies.num_bytes, context_blocks)
        self._host_rate, self._disk_rate = Rate(), Rate()
        self._num_loaded = {"host": 0, "disk": 0}
        self._read_errors = 0

    @property
    def room(self) -> int:
        """The most blocks that `save` may be called with now."""
        at_once = max(1, COPY_BYTES // self.copies.num_bytes)
        if self._host.max_blocks or self.disk is None:
            return at_once
        return min(at_once, self.disk.room)

    @property
    def max_blocks(self) -> int:
        """The most blocks that the tiers hold together; a block in both counts twice."""
        num_slots = 0 if self.disk is None else self.disk.disk.num_slots
        return self._host.max_blocks + num_slots

    # From the pool to the tiers.

    def wants(self, key: BlockKey) -> bool:
        """Return whether a tier lacks this block."""
        is_for_host = self._host.max_blocks > 0 and key.digest not in self._host
        return is_for_host or (self.disk is not None and self.disk.wants(key.digest))

    def save(self, blocks: Sequence[tuple[BlockKey, int]], done: Callable[[], object]) -> None:
        """Copy blocks of the pool to the tiers; call `done` when the blocks have been read."""

        def keep(copies: list[Buffer]) -> None:
            for (key, _), kv in zip(blocks, copies, strict=True):
                self._keep(key, kv)
            self._write()
            done()

        self._copying.put(lambda: [self.copies.copy_out(block) for _, block in blocks], keep)

    def _keep(self, key: BlockKey, kv: Buffer) -> None:
        if self._host.max_blocks and key.digest not in self._host:
            if self._host.is_full:
                evicted = self._host.evict()
                self._offer(evicted.key, evicted.place)
                self._prefixes.drop_prefix(evicted.key.hash, "host")
            self._host.add(key, kv)
            self._prefixes.hold_prefix(key.hash)
        self._offer(key, kv)

    def _offer(self, key: BlockKey, kv: Buffer) -> None:
        if self.disk is not None:
            self.disk.offer(key, kv)

    def _write(self) -> None:
        if self.disk is not None:
            self.disk.write()

    # From the tiers to the pool.

    def find(self, chain: Chain, blocks: Sequence[bytes]) -> list[Found]:
        """Return the blocks with these tokens that follow a chain, as far as tiers have them."""
        found = []
        for tokens in blocks:
            chain = key = follow(chain, tokens)
            kv, slot = self._host.get(key), None
            if kv is None and self.disk is not None and not self.is_disk_late:
                slot = self.disk.index.get(key)
            if kv is None and slot is None:
                break
            found.append(Found(key, kv, slot))
        return found

    def seconds(self, found: Sequence[Found]) -> float:
        """Return how long it takes to load these blocks, as measured; 0 if it never was."""
        num_on_disk = sum(it.kv is None for it in found)
        size = self.copies.num_bytes
        host_s = self._host_rate.seconds((len(found) - num_on_disk) * size)
        return host_s + self._disk_rate.seconds(num_on_disk * size)

    def doubt(self) -> None:
        """Record that computing was preferred: in time a tier is tried again."""
        self._host_rate.doubt()
        self._disk_rate.doubt()

    def use(self, chain: Chain) -> None:
        """Record that a sequence continues from the end of this chain."""
        self._host.use(chain.digest)
        if self.disk is not None:
            self.disk.index.use(chain.digest)

    def load(
        self,
        found: Sequence[Found],
        blocks: Sequence[int],
        progress: Progress,
        done: Callable[[], object],
    ) -> None:
        """Read blocks into those of the pool; call `done` when no more will be read."""

        def end(read: _Read) -> None:
            self._count(found, read)
            done()

        is_on_disk = any(it.kv is None for it in found)
        thread = self.disk.thread if self.disk is not None and is_on_disk else self._copying
        thread.put(lambda: self._read(found, blocks, progress), end, is_awaited=True)

    def _read(self, found: Sequence[Found], blocks: Sequence[int], progress: Progress) -> _Read:
        """Read blocks, in order, until one fails; on a thread of the tiers."""
        read = _Read()
        for it, block in zip(found, blocks, strict=True):
            if progress.is_stopped:
                break
            start_s = self._clock()
            kv = it.kv if it.slot is None else self._read_from_disk(it.slot, it.key)
            if kv is None:
                read.is_damaged = True
                break
            with progress.lock:
                if progress.is_stopped:
                    break
                self.copies.copy_in(block, kv)
                progress.num_loaded += 1
            seconds = self._clock() - start_s
            read.host_s += seconds if it.slot is None else 0.0
            read.disk_s += seconds if it.slot is not None else 0.0
            read.num_blocks += 1
        return read

    def _read_from_disk(self, slot: Slot, key: BlockKey) -> Buffer | None:
        assert self.disk is not None
        try:
            return self.disk.disk.read(slot, key)
        except OSError as error:
            log.warning("a block cannot be read from disk", reason=str(error))
            return None

    def _count(self, found: Sequence[Found], read: _Read) -> None:
        num_read = read.num_blocks
        num_on_disk = sum(it.slot is not None for it in found[:num_read])
        self._num_loaded["disk"] += num_on_disk
        self._num_loaded["host"] += num_read - num_on_disk
        size = self.copies.num_bytes
        self._host_rate.observe((num_read - num_on_disk) * size, read.host_s)
        self._disk_rate.observe(num_on_disk * size, read.disk_s)
        if read.is_damaged and self.disk is not None:
            self._read_errors += 1
            self.disk.forget(found[num_read].key)
        for it in found[:num_read]:
            if it.kv is not None:  # it may not be on the disk yet
                self._offer(it.key, it.kv)
        self._write()
        if num_read:
            self.use(found[num_read - 1].key)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for the disk."""
        return self.disk is None or self.disk.is_idle

    def close(self, wait_s: float) -> None:
        """End the threads; close the files if the disk has ended within `wait_s` seconds."""
        self._copying.close(wait_s)
        if self.disk is not None and self.disk.thread.close(wait_s):
            self.disk.disk.close()

    # Figures.

    def figures(self, block_size: int) -> TierFigures:
        """Return the figures; thread-safe."""
        host = self._tier_load("host", self._host, self.copies.num_bytes, block_size)
        if self.disk is None:
            return TierFigures(host, TierLoad(), {})
        index, record_bytes = self.disk.index, self.disk.disk.record_bytes
        failures = {
            "write": self.disk.write_errors,
            "read": self._read_errors,
            "skipped": self.disk.skipped_blocks,
        }
        return TierFigures(host, self._tier_load("disk", index, record_bytes, block_size), failures)

    def _tier_load(
        self, tier: str, index: Index[Any], block_bytes: int, block_size: int
    ) -> TierLoad:
        num_blocks = len(index)
        return TierLoad(
            max_blocks=index.max_blocks,
            blocks=num_blocks,
            bytes=num_blocks * block_bytes,
            loaded_tokens=self._num_loaded[tier] * block_size,
        )
