"""Memory of a device is mapped by a descriptor, and lives as long as anybody has it.

The driver is one of the CPU with the declarations of cuda.h (`tests/kernels/shim/libcuda.cpp`).
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cuda import device_memory
from kernels.cuda.device_memory import DeviceMemory
from tests.kernels.shim.driver import driver as driver
from tests.kernels.shim.lane import CpuLane

SIZE = 128 << 10


@pytest.fixture
def lane(driver: ctypes.CDLL) -> CpuLane:
    return CpuLane()


@pytest.mark.parametrize(("device", "number"), [("cpu", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_memory_is_of_the_device_of_its_lane(
    lane: CpuLane, driver: ctypes.CDLL, device: str, number: int
) -> None:
    lane.device = torch.device(device)
    ours = DeviceMemory.allocate(lane, SIZE)
    theirs = DeviceMemory.map(lane, ours.descriptor, ours.about)
    assert theirs.address and driver.shim_device() == number


# A driver need not know of memory that is only read.
@pytest.mark.parametrize(("refused", "access"), [(b"", "r--s"), (b"reading alone", "rw-s")])
def test_memory_of_others_is_mapped_to_read_where_that_can_be(
    lane: CpuLane, driver: ctypes.CDLL, refused: bytes, access: str
) -> None:
    ours = DeviceMemory.allocate(lane, SIZE)
    driver.shim_refuse(refused)
    theirs = DeviceMemory.map(lane, ours.descriptor, ours.about)
    (found,) = (
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith(f"{theirs.address:x}-")
    )
    assert found == access


def test_what_is_written_is_read_where_it_was_mapped(lane: CpuLane) -> None:
    ours = DeviceMemory.allocate(lane, SIZE - 100)
    assert len(ours) == SIZE and not os.get_inheritable(ours.descriptor)
    assert ours.about == b"cuda %d" % SIZE
    theirs = DeviceMemory.map(lane, ours.descriptor, ours.about)
    lane.tensor(ours)[5] = 9
    assert lane.tensor(theirs)[5] == 9 and theirs.address != ours.address


def test_pieces_go_to_memory_and_to_the_host(lane: CpuLane) -> None:
    ours, other = DeviceMemory.allocate(lane, SIZE), DeviceMemory.allocate(lane, SIZE)
    kv = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    lane.tensor(ours).numpy()[:] = kv
    theirs, places = DeviceMemory.map(lane, ours.descriptor, ours.about), [4096, 0]
    digest = ours.digest(places, 1024, 7)
    assert theirs.copy(places, 1024, other, [2048, 64], 7) == digest
    assert (lane.tensor(other).numpy()[2048:3072] == kv[4096:5120]).all()
    room = theirs.room(2048)
    assert theirs.copy(places, 1024, room, [0, 1024], 7) == digest
    assert (room.bytes == np.concatenate([kv[4096:5120], kv[:1024]])).all()


def test_memory_is_freed_when_nobody_has_it_any_more(lane: CpuLane, driver: ctypes.CDLL) -> None:
    gc.collect()
    descriptors, live = os.listdir("/proc/self/fd"), driver.shim_live()
    ours = DeviceMemory.allocate(lane, SIZE)
    theirs, tensor = DeviceMemory.map(lane, ours.descriptor, ours.about), lane.tensor(ours)
    del ours
    tensor[0] = 3  # which keeps the memory it is made of
    assert lane.tensor(theirs)[0] == 3
    del tensor
    assert lane.tensor(theirs)[0] == 3, "who has it mapped can read it, whoever has made it"
    del theirs
    assert (os.listdir("/proc/self/fd"), driver.shim_live()) == (descriptors, live)


@pytest.mark.parametrize(
    "name",
    [
        *("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"),
        "cuMemExportToShareableHandle",
    ],
)
def test_what_fails_leaves_nothing(lane: CpuLane, driver: ctypes.CDLL, name: str) -> None:
    descriptors, live = os.listdir("/proc/self/fd"), driver.shim_live()
    driver.shim_refuse(name.encode())
    with pytest.raises(OSError, match=rf"{name}: not here \(801\)"):
        DeviceMemory.allocate(lane, SIZE)
    assert (os.listdir("/proc/self/fd"), driver.shim_live()) == (descriptors, live)


@pytest.mark.parametrize(
    "about",
    [b"", b"cuda", b"cuda x", b"cuda 0", b"cuda -1", b"rocm 131072", b"cuda 65536", b"\xff"],
)
def test_memory_of_another_kind_or_size_is_not_mapped(
    lane: CpuLane, driver: ctypes.CDLL, about: bytes
) -> None:
    ours = DeviceMemory.allocate(lane, SIZE)
    live = driver.shim_live()
    with pytest.raises(OSError):
        DeviceMemory.map(lane, ours.descriptor, about)
    assert driver.shim_live() == live


def test_without_a_driver_there_is_no_such_memory(
    driver: ctypes.CDLL, lane: CpuLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "LIBRARY", "libnone.so.1")
    device_memory._library.cache_clear()  # noqa: SLF001
    with pytest.raises(OSError, match="libnone"):
        DeviceMemory.allocate(lane, SIZE)
