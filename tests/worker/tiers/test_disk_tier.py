"""Which blocks are on the disk: what is written when, and what a failing or full disk costs."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.worker.tiers.chains import chain
from tests.worker.tiers.lazy import LazyThread
from wire.parts import Buffer
from worker.engine.blocks import BlockPool
from worker.tiers.disk import Disk, Files
from worker.tiers.disk_tier import MAX_PAUSE_S, DiskTier
from worker.tiers.keys import BlockKey
from worker.tiers.records import Checksum, RecordFormat
from worker.tiers.threads import Results

KV = bytes(100)


class Failing(Files):
    """Fails with `error` when it is told to; with ENOSPC only where the file has to grow."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.num_bytes = 1 << 30

    def write(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> None:
        is_new = offset + sum(map(len, parts)) > self.num_bytes
        if self.error is not None and (is_new or self.error != errno.ENOSPC):
            raise OSError(self.error, "as told")
        super().write(descriptor, parts, offset)


class Stage:
    """A disk tier whose jobs run on demand."""

    def __init__(self, folder: Path, num_slots: int = 4) -> None:
        self.now = 100.0
        self.files, self.results = Failing(), Results()
        self.thread = LazyThread(self.results)
        self.pool = BlockPool(1, 1)
        record = RecordFormat(1, len(KV), b"model", Checksum())
        self.disk = Disk(folder, record, num_slots * record.total_bytes, self.files)
        self.tier = DiskTier(
            self.disk,
            self.thread,
            self.pool,
            block_bytes=len(KV),
            context_blocks=9,
            clock=lambda: self.now,
        )
        self.tier.open()

    def offer(self, *keys: BlockKey) -> None:
        for key in keys:
            self.tier.offer(key, KV)
            self.tier.write()

    def run(self) -> None:
        while len(self.thread):
            self.thread.run_one()
            self.results.deliver()

    def on_disk(self, *keys: BlockKey) -> list[bool]:
        return [self.tier.index.get(key) is not None for key in keys]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_what_is_offered_while_a_batch_is_written_makes_the_next_batch(stage: Stage) -> None:
    keys = chain(1, 2, 3)
    stage.offer(*keys, *keys)
    assert len(stage.thread) == 1 and not any(stage.on_disk(*keys))
    assert not any(stage.tier.wants(key.digest) for key in keys) and not stage.tier.is_idle
    stage.thread.run_one()
    stage.results.deliver()
    assert stage.on_disk(*keys) == [True, False, False] and len(stage.thread) == 1
    stage.run()
    assert all(stage.on_disk(*keys)) and stage.tier.is_idle
    assert stage.pool.journal.read() == (tuple(key.hash for key in keys), {})


def test_full_batches_do_not_wait_for_each_other(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_slots=9)
    stage.tier.max_batch = 2
    stage.offer(*chain(*range(8)))
    assert len(stage.thread) == 4, "one, two, two, two; the last waits for company"
    stage.offer(*chain(*range(10, 14)))
    assert len(stage.thread) == 5, "all slots are being written, so that none can be evicted"
    stage.run()
    assert len(stage.tier.index) == 9 and stage.tier.is_idle


def test_a_new_block_takes_the_slot_of_the_cheapest(stage: Stage) -> None:
    old, new = chain(1, 2, 3, 4), chain(5, 6)
    stage.offer(*old)
    stage.run()
    stage.pool.journal.read()
    for key in new:
        stage.offer(key)
        stage.run()
    assert stage.on_disk(*old, *new) == [True, True, False, False, True, True]
    stored, evicted = stage.pool.journal.read()
    assert tuple(evicted) == (old[3].hash, old[2].hash) and stored == tuple(key.hash for key in new)


def test_the_index_is_read_at_the_start(stage: Stage, tmp_path: Path) -> None:
    keys = chain(1, 2, 3)
    stage.offer(*keys)
    stage.run()
    stage.disk.close()
    headers = tmp_path / "headers"
    size = headers.stat().st_size // 3
    content = bytearray(headers.read_bytes())
    content[size] ^= 1
    headers.write_bytes(content)
    again = Stage(tmp_path)
    assert again.on_disk(*keys) == [True, False, True]
    again.offer(keys[1], *chain(8))
    again.run()
    assert all(again.on_disk(*keys, *chain(8))), "the slot of the damaged block was free"


def test_a_slow_disk_has_a_short_line(stage: Stage) -> None:
    stage.tier.max_unwritten = 2
    stage.offer(*chain(1, 2, 3, 4, 5))
    assert stage.tier.room == 0 and stage.tier.skipped_blocks == 3
    stage.run()
    assert len(stage.tier.index) == 2 == stage.tier.room


def test_after_an_error_nothing_is_written_for_a_while(stage: Stage) -> None:
    stage.files.error = errno.EIO
    pauses = []
    for token in range(8):
        stage.offer(*chain(token))
        stage.run()
        assert stage.tier.room == 0 and stage.tier.write_errors == token + 1
        stage.offer(*chain(99))
        assert stage.tier.is_idle, "it is not even tried"
        start = stage.now
        while stage.tier.room == 0:
            stage.now += 1.0
        pauses.append(stage.now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, MAX_PAUSE_S]
    stage.files.error = None
    stage.offer(*chain(*range(4)))
    stage.run()
    assert len(stage.tier.index) == 4 and stage.tier.skipped_blocks == 16


def test_a_full_disk_keeps_what_it_has_room_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_slots=100)
    stage.files.error, stage.files.num_bytes = errno.ENOSPC, 5 * (len(KV) + 16)
    for token in range(30):
        stage.offer(*chain(token))
        stage.run()
    assert len(stage.tier.index) == 5 and stage.tier.write_errors == 1
    assert stage.on_disk(*chain(29)) == [True] and stage.on_disk(*chain(0)) == [False]
    stage.disk.close()
    assert len(Stage(tmp_path, num_slots=100).tier.index) == 5


def test_batches_that_a_full_disk_refuses_one_after_another_leave_it_usable(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_slots=100)
    stage.files.error, stage.files.num_bytes = errno.ENOSPC, 2 * (len(KV) + 16)
    stage.offer(*chain(1, 2))
    stage.run()
    stage.tier.max_batch = 3
    stage.offer(*chain(*range(10, 17)))
    assert len(stage.thread) == 3
    stage.run()
    assert stage.tier.write_errors == 3
    new = chain(20, 21, 22, 23)
    stage.offer(*new)
    stage.run()
    assert len(stage.tier.index) == 2 and stage.on_disk(new[-1]) == [True]


def test_a_block_that_cannot_be_read_is_forgotten(stage: Stage) -> None:
    keys = chain(1, 2)
    stage.offer(*keys)
    stage.run()
    stage.tier.forget(keys[1])
    stage.tier.forget(keys[1])
    assert stage.on_disk(*keys) == [True, False] and stage.tier.wants(keys[1].digest)
    stage.offer(keys[1])
    stage.run()
    assert all(stage.on_disk(*keys))
