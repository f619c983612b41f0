"""Blocks on disk: two files of equal records, one with headers and one with KV.

Record i of both files is one block.  A new block takes the place of an evicted one, so the files
never grow over their limit and nothing is compacted.  The headers lie together, so that the index
is read quickly at the start.  KV is written and synchronized before its header; the tags of both
(`worker.tiers.records`) show any mixture that a crash leaves behind, and a record that does not
open is free.

    DIR/<model>-<identity>/<worker>/lock, headers, kv
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from wire.parts import Buffer
from worker.tiers.keys import BlockKey
from worker.tiers.records import RecordFormat

# How much of the headers is read at a time.
_SCAN_BYTES: Final = 1 << 20


class Slot(NamedTuple):
    """The number of a record, and the nonce of the block that is in it."""

    number: int
    nonce: bytes


class Files:
    """The operations on files that tests let fail."""

    def write(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
        """Write all bytes.  Raises OSError."""
        rest = [memoryview(part) for part in parts]
        while rest:
            written = os.pwritev(descriptor, rest, offset)
            offset += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][written:]

    def read(self, descriptor: int, num_bytes: int, offset: int) -> bytes:
        """Read up to `num_bytes`, less at the end of the file.  Raises OSError."""
        return os.pread(descriptor, num_bytes, offset)

    def synchronize(self, descriptor: int) -> None:
        os.fdatasync(descriptor)


class Disk:
    """The files of one worker in `folder`, which no other process uses meanwhile.

    Only one thread may call it at a time.
    """

    def __init__(
        self, folder: Path, record: RecordFormat, max_bytes: int, files: Files | None = None
    ) -> None:
        """Open or create the files.

        Raises:
            ValueError: `max_bytes` is too little for one block.
            BlockingIOError: Another process uses the folder.
            OSError: The folder cannot be used.
        """
        self.num_slots = max_bytes // record.total_bytes
        if not self.num_slots:
            size = record.total_bytes
            raise ValueError(f"--disk-kv-bytes is {max_bytes}, and one block takes {size}")
        self.record_bytes = record.total_bytes
        self._record, self._files = record, files or Files()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptors: list[int] = []
        try:
            lock, self._headers, self._kv = (
                self._open(folder / name) for name in ("lock", "headers", "kv")
            )
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._shorten(self._headers, record.header_bytes)
            self._shorten(self._kv, record.kv_bytes)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def scan(self) -> Iterator[tuple[Slot, BlockKey] | None]:
        """Read all headers: yield slot and key of each block, None for one that does not open.

        Raises:
            OSError: The headers cannot be read.
        """
        size = self._record.header_bytes
        at_once = max(1, _SCAN_BYTES // size)
        for first in range(0, self.num_slots, at_once):
            numbers = range(first, min(first + at_once, self.num_slots))
            headers = self._files.read(self._headers, len(numbers) * size, first * size)
            for number, start in zip(numbers, range(0, len(headers), size), strict=False):
                packed = headers[start : start + size]
                if any(packed):  # else it was never written
                    opened = self._record.open_header(packed)
                    yield None if opened is None else (Slot(number, opened[0]), opened[1])
            if len(headers) < len(numbers) * size:
                return

    def write(self, blocks: Sequence[tuple[int, BlockKey, Buffer]]) -> list[Slot]:
        """Write blocks and their KV to these slots, and synchronize the files.

        Raises:
            OSError: None of the blocks can be counted on.
        """
        slots = [Slot(number, self._record.new_nonce()) for number, _, _ in blocks]
        size = self._record.kv_bytes
        for (number, nonce), (_, key, kv) in zip(slots, blocks, strict=True):
            self._files.write(self._kv, self._record.pack_kv(nonce, key, kv), number * size)
        self._files.synchronize(self._kv)
        size = self._record.header_bytes
        for (number, nonce), (_, key, _) in zip(slots, blocks, strict=True):
            header = self._record.pack_header(nonce, key)
            self._files.write(self._headers, [header], number * size)
        self._files.synchronize(self._headers)
        return slots

    def read(self, slot: Slot, key: BlockKey) -> Buffer | None:
        """Return the KV of a block; None if its slot has something else by now or is damaged.

        Raises:
            OSError: The disk fails.
        """
        size = self._record.kv_bytes
        packed = self._files.read(self._kv, size, slot.number * size)
        return self._record.open_kv(slot.nonce, key, packed) if len(packed) == size else None

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        return descriptor

    def _shorten(self, descriptor: int, record_bytes: int) -> None:
        """Cut off what an earlier, larger limit left; the limit holds from the start."""
        with suppress(OSError):
            if os.fstat(descriptor).st_size > self.num_slots * record_bytes:
                os.ftruncate(descriptor, self.num_slots * record_bytes)
