"""Copies are exact, and their digest is XXH3-64 as xxhash computes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from xxhash import xxh3_64_intdigest

from kernels.cpu import copying
from kernels.cpu.copying import BLOCK_BYTES
from kernels.cpu.tasks import CACHE_LINE

Bytes = npt.NDArray[np.uint8]


def drawn(num_bytes: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def room(num_bytes: int, misplaced: int = 0) -> Bytes:
    """Return zeros that begin so many bytes behind a cache line."""
    memory = np.zeros(num_bytes + 2 * CACHE_LINE, np.uint8)
    return memory[-memory.ctypes.data % CACHE_LINE + misplaced :][:num_bytes]


@pytest.mark.parametrize("seed", [0, 1, 7 << 32 | 5, (1 << 64) - 1])
@pytest.mark.parametrize("sizes", [(1,), (2,), (17,), (1, 1), (3, 1, 3), (4, 4)])
def test_what_is_copied_is_digested(sizes: tuple[int, ...], seed: int) -> None:
    source = drawn(sum(sizes) * BLOCK_BYTES)
    ends = np.cumsum(sizes)[:-1] * BLOCK_BYTES
    pairs = [(piece, room(len(piece))) for piece in np.split(source, ends)]
    assert copying.copy(pairs, seed) == xxh3_64_intdigest(source.data, seed=seed)
    assert np.array_equal(np.concatenate([target for _, target in pairs]), source)


def test_a_source_may_begin_anywhere() -> None:
    source = drawn(2 * BLOCK_BYTES + 1)[1:]
    target = room(len(source))
    assert copying.copy([(source, target)], 3) == xxh3_64_intdigest(source.data, seed=3)
    assert np.array_equal(target, source)


def test_nothing_is_written_beside_a_target() -> None:
    around = room(3 * BLOCK_BYTES)
    around[:] = 7
    copying.copy([(drawn(BLOCK_BYTES), around[BLOCK_BYTES : 2 * BLOCK_BYTES])], 0)
    assert (around[:BLOCK_BYTES] == 7).all() and (around[2 * BLOCK_BYTES :] == 7).all()


@pytest.mark.parametrize(
    "targets",
    [
        [room(0)],
        [room(BLOCK_BYTES - 1)],
        [room(BLOCK_BYTES, misplaced=8)],
        [room(BLOCK_BYTES), room(BLOCK_BYTES // 2)],
    ],
)
def test_other_targets_are_left_alone(targets: list[Bytes]) -> None:
    pairs = [(drawn(len(target)), target) for target in targets]
    assert copying.copy(pairs, 0) is None
    assert not any(target.any() for target in targets)
