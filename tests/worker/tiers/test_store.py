"""Blocks go to host memory and to disk, and come back from where they are."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.worker.tiers.chains import chain
from tests.worker.tiers.lazy import LazyTiers
from worker.engine.blocks import ROOT, BlockPool
from worker.executor.hash import LAYOUT, HashKVCache
from worker.tiers.disk import Files
from worker.tiers.keys import BlockKey
from worker.tiers.store import Progress, TierFigures

NUM_BLOCKS = 12


class Stage:
    """A cache with random content, a store, and its tiers."""

    def __init__(self, folder: Path, host_blocks: int, disk_blocks: int) -> None:
        self.now = 0.0
        self.files = FailingReads()
        self.cache = HashKVCache(NUM_BLOCKS, 1)
        draw = np.random.default_rng(1)
        self.cache.kv[:] = draw.integers(0, 256, self.cache.kv.shape, np.uint8)
        self.pool = BlockPool(NUM_BLOCKS, 1)
        self.tiers = LazyTiers(
            folder, host_blocks, disk_blocks, files=self.files, clock=lambda: self.now
        )
        self.store = self.tiers.open(self.cache, self.pool)

    @property
    def figures(self) -> TierFigures:
        return self.store.figures(1)

    def run(self) -> None:
        while self.tiers.num_jobs:
            self.tiers.copying.close(0)
            self.tiers.writing.close(0)
            self.store.results.deliver()

    def save(self, keys: list[BlockKey], first: int = 0) -> None:
        self.store.save([(key, first + i) for i, key in enumerate(keys)], lambda: None)
        self.run()

    def load(self, keys: list[BlockKey], first: int) -> int:
        """Load what is found of a chain into blocks from `first` on; return how many came."""
        found = self.store.find(ROOT, [key.tokens for key in keys])
        self.loaded = -1
        blocks = range(first, first + len(found))
        progress = Progress()
        self.store.load(
            found, blocks, progress, lambda: setattr(self, "loaded", progress.num_loaded)
        )
        self.run()
        return self.loaded

    def is_equal(self, block: int, other: int) -> bool:
        return bool((self.cache.kv[block] == self.cache.kv[other]).all())


class FailingReads(Files):
    is_failing = False
    on_read: Callable[[], object] = staticmethod(lambda: None)

    def read(self, descriptor: int, num_bytes: int, offset: int) -> bytes:
        self.on_read()
        if self.is_failing:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(descriptor, num_bytes, offset)


@pytest.mark.parametrize("rooms", [(4, 0), (0, 4), (1, 4), (2, 2), (4, 4)])
def test_what_was_saved_is_loaded(tmp_path: Path, rooms: tuple[int, int]) -> None:
    stage, keys = Stage(tmp_path, *rooms), chain(1, 2)
    assert all(map(stage.store.wants, keys))
    stage.save(keys)
    assert any(map(stage.store.wants, keys)) == (rooms[0] == 1), "host memory is for one only"
    assert stage.load([*keys, *chain(3, after=keys[1])], 4) == 2
    assert stage.is_equal(4, 0) and stage.is_equal(5, 1) and not stage.is_equal(6, 2)
    figures = stage.figures
    host, disk = figures.host, figures.disk
    assert (host.blocks, disk.blocks) == (min(rooms[0], 2), min(rooms[1], 2))
    assert (
        host.loaded_tokens + disk.loaded_tokens == 2
        and host.bytes == host.blocks * LAYOUT.token_bytes
    )
    assert (disk.bytes > 0) == (disk.blocks > 0) and stage.store.max_blocks == sum(rooms)


def test_what_leaves_host_memory_is_found_on_disk_only(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 2, 9), chain(1, 2, 3)
    stage.save(keys)
    found = stage.store.find(ROOT, [key.tokens for key in keys])
    assert sorted(it.kv is None for it in found) == [False, False, True]
    stage.store.is_disk_late = True
    found = stage.store.find(ROOT, [key.tokens for key in keys])
    assert len(found) < 3 and all(it.kv is not None for it in found)


def test_a_block_that_the_disk_had_no_room_for_is_offered_again(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 3, 9), chain(1, 2, 3)
    assert stage.store.disk is not None
    stage.store.disk.max_unwritten = 0
    stage.save(keys)
    assert stage.figures.disk.blocks == 0 and stage.figures.failures["skipped"] == 3
    stage.store.disk.max_unwritten = 9
    assert stage.load(keys[:1], 5) == 1
    stage.run()
    assert stage.figures.disk.blocks == 1, "read from host memory"
    stage.save(chain(7, 8, 9), 6)
    assert stage.store.disk.index.get(keys[2]) is not None, "as it left host memory"


def test_a_damaged_block_ends_the_load(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 0, 9), chain(1, 2, 3)
    stage.save(keys)
    with (tmp_path / "kv").open("r+b") as file:
        file.seek(LAYOUT.token_bytes + 16 + 5)
        file.write(b"?")
    assert stage.load(keys, 4) == 1 and stage.is_equal(4, 0)
    assert stage.figures.failures["read"] == 1 and stage.store.wants(keys[1])
    assert [it.key for it in stage.store.find(ROOT, [key.tokens for key in keys])] == keys[:1]


def test_a_disk_that_cannot_be_read_costs_no_more_than_the_load(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 0, 9), chain(1, 2)
    stage.save(keys)
    stage.files.is_failing = True
    assert stage.load(keys, 4) == 0 and stage.figures.failures["read"] == 1


def test_a_load_that_is_stopped_ends_before_the_next_block(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 4, 0), chain(1, 2)
    stage.save(keys)
    found = stage.store.find(ROOT, [key.tokens for key in keys])
    progress, ends = Progress(is_stopped=True), list[bool]()
    stage.store.load(found, (5, 6), progress, lambda: ends.append(True))
    stage.run()
    assert ends and not progress.num_loaded and not stage.is_equal(5, 0)


def test_a_load_that_is_stopped_during_a_read_does_not_write(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 0, 4), chain(1, 2)
    stage.save(keys)
    found, progress = stage.store.find(ROOT, [key.tokens for key in keys]), Progress()
    stage.files.on_read = lambda: setattr(progress, "is_stopped", True)
    stage.store.load(found, (5, 6), progress, lambda: None)
    stage.run()
    assert not progress.num_loaded and not progress.lock.locked() and not stage.is_equal(5, 0)


def test_routers_hear_of_a_block_until_no_tier_has_it(tmp_path: Path) -> None:
    stage, (key,) = Stage(tmp_path, 1, 1), chain(1)
    prefix = stage.pool.register(ROOT, key.tokens, *(block := stage.pool.allocate(1)))
    stage.pool.free(block)
    stage.save([key])
    assert stage.pool.journal.read() == ((key.hash,), {})
    stage.pool.free(stage.pool.allocate(NUM_BLOCKS))
    assert stage.pool.num_cached == 0 and stage.pool.journal.read() == ((), {})
    stage.pool.republish()
    assert stage.pool.journal.read() == ((prefix.hash,), {}), "it is in both tiers"
    (other,) = chain(2)
    stage.save([other])
    assert stage.pool.journal.read() == ((other.hash,), {key.hash: "disk"})


def test_routers_hear_which_tier_had_a_block_last(tmp_path: Path) -> None:
    stage, (key, other) = Stage(tmp_path, 1, 0), chain(1, 2)[:2]
    stage.pool.hold_prefix(key.hash)
    stage.save([key])
    stage.pool.journal.read()
    stage.save([other])
    assert stage.pool.journal.read() == ((other.hash,), {}), "the KV cache still has it"
    stage.pool.drop_prefix(key.hash)
    assert stage.pool.journal.read() == ((), {key.hash: "kv_cache"})
    stage.save(chain(3))
    assert stage.pool.journal.read()[1] == {other.hash: "host"}


def test_times_are_measured(tmp_path: Path) -> None:
    stage, keys = Stage(tmp_path, 4, 0), chain(1, 2)
    stage.save(keys)
    found = stage.store.find(ROOT, [key.tokens for key in keys])
    assert stage.store.seconds(found) == 0.0, "not measured yet"
    copy_in = stage.store.copies.copy_in

    def slow_copy(block: int, kv: bytes) -> None:
        stage.now += 2.0
        copy_in(block, kv)

    stage.store.copies.copy_in = slow_copy  # type: ignore[method-assign, assignment]
    stage.load(keys, 4)
    assert stage.store.seconds(found) == pytest.approx(4.0)
    stage.store.doubt()
    assert stage.store.seconds(found) < 4.0
