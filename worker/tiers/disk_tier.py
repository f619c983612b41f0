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
from worker.tiers.disk import Disk, Slot
from worker.tiers.index import Entry, Index
from worker.tiers.keys import BlockKey

# Bytes that are written between two synchronizations.
BATCH_BYTES: Final = 16 << 20
# Bytes that wait for the disk.  If it is slower than the engine, some blocks are not written.
MAX_UNWRITTEN_BYTES: Final = 4 * BATCH_BYTES
# After an error of the disk nothing is written for so long, twice as long after each further one.
MIN_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0

R = TypeVar("R")
Blocks = dict[bytes, tuple[BlockKey, Buffer]]
log = structlog.get_logger("worker")


class Thread(Protocol):
    """Runs jobs in order (`worker.tiers.threads.JobThread`)."""

    def put(
        self, work: Callable[[], R], done: Callable[[R], object], *, is_awaited: bool = False
    ) -> None: ...
    def close(self, wait_s: float) -> bool: ...


class Journal(Protocol):
    """Told of the prefix hashes of blocks that a tier has or drops."""

    def hold_prefix(self, prefix_hash: int) -> None: ...
    def drop_prefix(self, prefix_hash: int) -> None: ...


class DiskTier:
    """The blocks of one `Disk`, whose files only `thread` reads and writes."""

    def __init__(
        self,
        disk: Disk,
        thread: Thread,
        journal: Journal,
        *,
        block_bytes: int,
        context_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self.disk, self.thread = disk, thread
        self.index = Index[Slot](disk.num_slots, context_blocks)
        self.write_errors = self.skipped_blocks = 0
        self._journal, self._clock = journal, clock
        self._max_batch = min(max(1, BATCH_BYTES // block_bytes), disk.num_slots)
        self.max_unwritten = max(1, MAX_UNWRITTEN_BYTES // block_bytes)
        self._unwritten: Blocks = {}
        self._writing: Blocks = {}
        self._slots: list[int] = []  # of the blocks in `_writing`
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
        return 0 if is_paused else self.max_unwritten - len(self._unwritten)

    def wants(self, digest: bytes) -> bool:
        """Return whether a block is neither on the disk nor on its way."""
        is_on_its_way = digest in self._unwritten or digest in self._writing
        return not is_on_its_way and digest not in self.index

    def offer(self, key: BlockKey, kv: Buffer) -> None:
        """Have a block written if it is wanted and there is room in the line."""
        if not self.wants(key.digest):
            return
        if self.room <= 0:
            self.skipped_blocks += 1
            return
        self._unwritten[key.digest] = key, kv
        self.write()

    def write(self) -> None:
        """Start to write the next batch, unless one is being written."""
        if self._writing or not self._unwritten:
            return
        for digest in [*islice(self._unwritten, min(self._max_batch, self._limit))]:
            self._writing[digest] = self._unwritten.pop(digest)
        self._slots = [self._take_slot() for _ in self._writing]
        pairs = zip(self._slots, self._writing.values(), strict=True)
        batch = [(slot, key, kv) for slot, (key, kv) in pairs]

        def work() -> list[Slot] | OSError:
            try:
                return self.disk.write(batch)
            except OSError as error:
                return error

        self.thread.put(work, self._on_written)

    def forget(self, key: BlockKey) -> None:
        """Drop a block that cannot be read."""
        if key.digest in self.index:
            self._free.append(self._dropped(self.index.remove(key)))

    def _on_written(self, outcome: list[Slot] | OSError) -> None:
        written, self._writing = self._writing, {}
        if isinstance(outcome, OSError):
            self._fail(outcome, len(written))
        else:
            self._pause_s = 0.0
            for (key, _), slot in zip(written.values(), outcome, strict=True):
                self._add(key, slot)
        self.write()

    def _fail(self, error: OSError, num_blocks: int) -> None:
        self.write_errors += 1
        self.skipped_blocks += num_blocks
        self._free += self._slots
        new = min((slot for slot in self._slots if slot >= self._num_written), default=0)
        if error.errno in (ENOSPC, EDQUOT) and new:  # so new blocks take the places of old ones
            self._limit = self._num_used = new
            self._free = [slot for slot in self._free if slot < new]
        else:
            self.skipped_blocks += len(self._unwritten)
            self._unwritten.clear()
            self._pause_s = min(max(MIN_PAUSE_S, 2 * self._pause_s), MAX_PAUSE_S)
            self._paused_until_s = self._clock() + self._pause_s
        log.warning("blocks are not written to disk", reason=str(error), blocks=num_blocks)

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
        self._journal.hold_prefix(key.hash)

    def _dropped(self, entry: Entry[Slot]) -> int:
        self._journal.drop_prefix(entry.key.hash)
        return entry.place.number
