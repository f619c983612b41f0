"""Memory that others may read: never to write, never of another size, gone with its last user."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.worker.transfer.mapped import num_mappings
from worker.compute.shared_memory import SharedMemory, map_memory, zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such memory")
SIZE = 3 << 20


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_what_one_writes_the_other_reads() -> None:
    memory = SharedMemory(SIZE)
    seen = map_memory(memory.descriptor)
    assert len(seen) == SIZE and not seen.any()
    memory.bytes[-1] = 7
    assert seen[-1] == 7


def test_pages_are_committed_when_they_are_written() -> None:
    (array,), memory = zeros(((1 << 32,), np.uint8))
    assert memory is not None and os.fstat(memory.descriptor).st_blocks == 0
    array[1 << 31] = 1
    committed = 512 * os.fstat(memory.descriptor).st_blocks
    assert 0 < committed <= 2 << 20, "one page, which may be a huge one"


def test_nobody_else_writes_or_changes_the_size() -> None:
    memory = SharedMemory(SIZE)
    seen = map_memory(memory.descriptor)
    assert not seen.flags.writeable
    # Opened again to write, as its user may: that is why it is sealed too.
    opened = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)
    for attempt in (
        lambda: mmap.mmap(opened, SIZE),
        lambda: os.pwrite(opened, b"x", 0),
        lambda: os.ftruncate(opened, 0),
        lambda: os.ftruncate(opened, 2 * SIZE),
    ):
        with pytest.raises(PermissionError):
            attempt()
    os.close(opened)
    assert os.fstat(memory.descriptor).st_size == SIZE and not seen.any()


def test_what_may_be_taken_away_is_not_mapped(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    with pytest.raises(PermissionError, match="not sealed"):
        map_memory(unsealed)
    os.close(unsealed)
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="Invalid"):
        map_memory(file.fileno())


def test_nothing_of_it_is_left() -> None:
    gc.collect()
    before, mapped = descriptors(), num_mappings()
    (array,), memory = zeros(((4, 1024), np.float32))
    assert memory is not None
    seen = map_memory(memory.descriptor)
    array[2, 3] = 1
    del memory
    assert seen.view(np.float32).sum() == 1  # the array keeps it, and so does who has mapped it
    assert num_mappings() == mapped + 2
    del array, seen
    assert num_mappings() == mapped and descriptors() == before


def test_several_arrays_lie_in_one_memory_apart_and_each_from_a_page_on() -> None:
    (first, none, last), memory = zeros(((3, 5), np.uint8), ((0, 2), "<u2"), ((2, 2), np.float64))
    assert memory is not None and none.shape == (0, 2)
    first[:], last[:] = 1, 2.5
    seen = map_memory(memory.descriptor)
    assert seen[:15].sum() == seen[: mmap.PAGESIZE].sum() == 15
    assert seen[mmap.PAGESIZE :].view(np.float64)[:5].tolist() == [2.5, 2.5, 2.5, 2.5, 0]


def test_without_such_memory_there_are_zeros_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (array,), memory = zeros(((0, 4), np.uint8))
    assert array.shape == (0, 4) and memory is None

    def refuse(*_: object) -> int:
        raise OSError("no such system call")

    monkeypatch.setattr(os, "memfd_create", refuse)
    (array,), memory = zeros(((2, 3), "<u2"))
    assert array.tolist() == [[0, 0, 0], [0, 0, 0]] and memory is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", "darwin")
        assert zeros(((2, 3), "<u2"))[1] is None
