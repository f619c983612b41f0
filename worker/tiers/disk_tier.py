"""The disk as a tier: which blocks are on it, which wait to be written.  On the engine's thread.

A failing disk costs no request: after an error, writing pauses for a while.  A full one keeps what
it has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from errno import EDQUOT, ENOSPC
from itertools import islice
from typing import Final, Protocol, TypeVar

import structlog

from wire.parts import Buffer
from wire.payloads import Tier
from worker.tiers.disk import Disk, Slot
from worker.tiers.index import Entry, Index
from worker.tiers.keys import BlockKey

# Bytes that are written between two synchronizations.
BATCH_BYTES: Final = 16 << 20
# Bytes that wait for the disk: more than a step computes.  If the disk is slower than the engine,
# some blocks are not written.
MAX_UNWRITTEN_BYTES: Final = 16 * BATCH_BYTES
# After an error of the disk nothing is written for so long, twice as long after each further one.
MIN_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0

R = TypeVar("R")
Blocks = dict[bytes, tuple[BlockKey, Buffer]]
Write = tuple[int, BlockKey, Buffer]  # the number of the slot, the block and its KV
log = structlog.get_logger("worker")


class Thread(Protocol):
    """Runs jobs in order (`worker.tiers.threads.JobThread`)."""

    def put(
        self, work: Callable[[], R], done: Callable[[R], object], *, is_awaited: bool = False
    ) -> None: ...
    def close(self, wait_s: float) -> bool: ...


class HeldPrefixes(Protocol):
    """Counts the blocks with each prefix hash, in the pool and its tiers: a `BlockPool`."""

    def hold_prefix(self, prefix_hash: int) -> None: ...
    def drop_prefix(self, prefix_hash: int, tier: Tier) -> None: ...


class DiskTier:
    """The blocks of one `Disk`, whose files only `thread` reads and writes."""

    def __init__(
        self,
        disk: Disk,
        thread: Thread,
        prefixes: HeldPrefixes,
        *,
        block_bytes: int,
        context_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self.disk, self.thread = disk, thread
        self.index = Index[Slot](disk.num_slots, context_blocks)
        self.write_errors = self.skipped_blocks = 0
        self._prefixes, self._clock = prefixes, clock
        self.max_batch = min(max(1, BATCH_BYTES // block_bytes), disk.num_slots)
        self.max_unwritten = max(1, MAX_UNWRITTEN_BYTES // block_bytes)
        self._unwritten: Blocks = {}
        self._writing: Blocks = {}
        self._free: list[int] = []
        self._num_used = 0  # all slots from this number on are free
        self._num_written = 0  # the file reaches this far
        self._limit = disk.num_slots
        self._pause_s = 0.0
        self._paused_until_s = 0.0

    def open(self) -> None:
        """Read what an earlier start has left; the thread must be idle.  Raises OSError."""
        num_skipped = 0
        for found in [*self.disk.scan()]:  # all or, if it fails half way, none
            if found is None or found[1].digest in self.index:
                num_skipped += 1
                continue
            slot, key = found
            self._free += range(self._num_used, slot.number)
            self._num_used = slot.number + 1
            self._add(key, slot)
        level = log.warning if num_skipped else log.info
        level("blocks on disk", found=len(self.index), skipped=num_skipped)

    @property
    def is_idle(self) -> bool:
        return not self._writing and not self._unwritten

    @property
    def room(self) -> int:
        """How many more blocks may wait to be written; 0 after an error, for a while."""
        is_paused = self._clock() < self._paused_until_s
        num_waiting = len(self._unwritten) + len(self._writing)
        return 0 if is_paused else self.max_unwritten - num_waiting

    def wants(self, digest: bytes) -> bool:
        """Return whether a block is neither on the disk nor on its way."""
        is_on_its_way = digest in self._unwritten or digest in self._writing
        return not is_on_its_way and digest not in self.index

    def offer(self, key: BlockKey, kv: Buffer) -> None:
        """Have the next `write` write a block, if it is wanted and there is room in the line."""
        if not self.wants(key.digest):
            return
        if self.room <= 0:
            self.skipped_blocks += 1
            return
        self._unwritten[key.digest] = key, kv

    def write(self) -> None:
        """Start to write full batches, and what is left if nothing is being written."""
        while self._unwritten and (not self._writing or len(self._unwritten) >= self.max_batch):
            size = min(self.max_batch, self._limit - len(self._writing))
            if size <= 0:
                return
            self._start([*islice(self._unwritten, size)])

    def _start(self, digests: list[bytes]) -> None:
        batch: list[Write] = []
        for digest in digests:
            key, kv = self._writing[digest] = self._unwritten.pop(digest)
            batch.append((self._take_slot(), key, kv))

        def work() -> list[Slot] | OSError:
            try:
                return self.disk.write(batch)
            except OSError as error:
                return error

        self.thread.put(work, lambda outcome: self._on_written(batch, outcome))

    def forget(self, key: BlockKey) -> None:
        """Drop a block that cannot be read."""
        if key.digest in self.index:
            self._free.append(self._dropped(self.index.remove(key)))

    def _on_written(self, batch: list[Write], outcome: list[Slot] | OSError) -> None:
        for _, key, _ in batch:
            del self._writing[key.digest]
        if isinstance(outcome, OSError):
            self._fail(outcome, [slot for slot, _, _ in batch])
        else:
            self._pause_s = 0.0
            for (_, key, _), slot in zip(batch, outcome, strict=True):
                self._add(key, slot)
        self.write()

    def _fail(self, error: OSError, slots: list[int]) -> None:
        self.write_errors += 1
        self.skipped_blocks += len(slots)
        self._free += slots
        new = min((slot for slot in slots if slot >= self._num_written), default=0)
        if error.errno in (ENOSPC, EDQUOT) and new:  # so new blocks take the places of old ones
            self._limit = self._num_used = min(new, self._limit)  # another batch may have failed
            self._free = [slot for slot in self._free if slot < self._limit]
        else:
            self.skipped_blocks += len(self._unwritten)
            self._unwritten.clear()
            self._pause_s = min(max(MIN_PAUSE_S, 2 * self._pause_s), MAX_PAUSE_S)
            self._paused_until_s = self._clock() + self._pause_s
        log.warning("blocks are not written to disk", reason=str(error), blocks=len(slots))

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used < self._limit:
            self._num_used += 1
            return self._num_used - 1
        return self._dropped(self.index.evict())

    def _add(self, key: BlockKey, slot: Slot) -> None:
        self.index.add(key, slot)
        self._num_written = max(self._num_written, slot.number + 1)
        self._prefixes.hold_prefix(key.hash)

    def _dropped(self, entry: Entry[Slot]) -> int:
        self._prefixes.drop_prefix(entry.key.hash, "disk")
        return entry.place.number
