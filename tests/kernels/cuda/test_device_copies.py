"""Pieces are copied to where they belong, and their digest notices whatever is not the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.cuda.device_copies import copy_pieces
from tests.gpu.lent import digest_of
from tests.kernels.shim.backend import why_not
from tests.kernels.shim.lane import CpuLane

Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def lane() -> CpuLane:
    if reason := why_not():
        pytest.skip(reason)
    return CpuLane()


def memory(seed: int, num_bytes: int = 1 << 18) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


# Less than a unit for each thread, a part that is not full, and several parts.
@pytest.mark.parametrize("size", [16, 48, 2048, 16 << 10, (16 << 10) + 16, 40_000])
def test_pieces_are_copied_and_digested_in_one_pass(lane: CpuLane, size: int) -> None:
    source, target = memory(1), np.zeros(1 << 18, np.uint8)
    places, targets = [100_000, 16, 48_000], [0, 50_000, 200_000]
    seed = 0xFEDCBA9876543210
    got = copy_pieces(lane, source.ctypes.data, places, size, seed, target.ctypes.data, targets)
    kv = np.concatenate([source[place : place + size] for place in places])
    wanted = np.zeros_like(target)
    for number, place in enumerate(targets):
        wanted[place : place + size] = kv[number * size :][:size]
    assert (target == wanted).all(), "nothing around the pieces is written"
    assert got == digest_of(torch.from_numpy(kv), seed)
    assert got == copy_pieces(lane, source.ctypes.data, places, size, seed)


def test_any_word_or_order_or_seed_makes_another_digest(lane: CpuLane) -> None:
    source, size = memory(2, 4096), 512
    places = [0, 512, 2048]

    def found(places: list[int] = places, seed: int = 7) -> int:
        return copy_pieces(lane, source.ctypes.data, places, size, seed)

    seen = {found(), found(seed=8), found([512, 0, 2048]), found([0, 512]), found([0, 512, 2064])}
    for at in (0, 511, 2048 + 100):
        source[at] ^= 1
        seen.add(found())
    assert len(seen) == 8


@pytest.mark.parametrize(
    ("places", "size", "targets"), [([8], 64, [0]), ([0], 40, [0]), ([0], 64, [24])]
)
def test_what_a_device_could_not_load_is_refused(
    lane: CpuLane, places: list[int], size: int, targets: list[int]
) -> None:
    source = memory(3, 256)
    with pytest.raises(ValueError, match="16 bytes"):
        copy_pieces(lane, source.ctypes.data, places, size, 7, source.ctypes.data, targets)


def test_a_digest_is_of_the_copy_though_the_source_changes_meanwhile(lane: CpuLane) -> None:
    # A thread copies units that lie 2048 bytes apart.  Here it writes each where it reads the next.
    source, size = memory(5), 6 * 2048
    copied = source[:size].copy()
    address = source.ctypes.data
    digest = copy_pieces(lane, address, [0], size, 7, address, [2048])
    assert (source[2048 : 2048 + size] == copied).all()
    assert digest == digest_of(torch.from_numpy(copied), 7)
