"""A block of layers with a window lies beside one of the cache, as long as it is said to."""

import numpy as np
import pytest

from worker.compute.window_blocks import NONE, WindowBlocks


def test_one_lies_beside_a_block_until_it_is_forgotten() -> None:
    blocks = WindowBlocks(6, 4, 2)
    assert (blocks.num_blocks, blocks.num_free, blocks.is_fixed) == (2, 2, False)
    blocks.take(5)
    blocks.take(3)
    assert sorted(blocks.table([5, 3])) == [0, 1] and 5 in blocks and 4 not in blocks
    with pytest.raises(IndexError):
        blocks.take(1)
    blocks.forget(5)
    blocks.take(1)
    assert blocks.table([5, 1])[0] == NONE and 5 not in blocks
    assert sorted(blocks.table([1, 3])) == [0, 1] and blocks.num_free == 0


def test_none_is_taken_or_forgotten_twice() -> None:
    blocks = WindowBlocks(6, 4, 2)
    blocks.take(5)
    with pytest.raises(AssertionError, match="has a window block"):
        blocks.take(5)
    blocks.forget(5)
    with pytest.raises(AssertionError, match="has no window block"):
        blocks.forget(5)
    assert blocks.num_free == 2


def test_where_nobody_says_each_block_has_its_own() -> None:
    blocks = WindowBlocks(6, 4)
    assert blocks.is_fixed and blocks.num_blocks == 6
    assert blocks.table(range(6)) == [*range(6)] and 5 in blocks


def test_slots_and_tables_of_a_step() -> None:
    blocks = WindowBlocks(9, 4, 3)
    for block in (7, 2):
        blocks.take(block)
    of_7, of_2 = blocks.table([7, 2])
    slots = np.array([4 * 7 + 1, 4 * 7 + 2, 4 * 2], np.int32)
    tables = np.array([[8, 7], [2, 7]], np.int32)
    found, in_windows = blocks.of_step(slots, tables)
    assert found.tolist() == [4 * of_7 + 1, 4 * of_7 + 2, 4 * of_2]
    assert in_windows.tolist() == [[NONE, of_7], [of_2, of_7]]
    assert found.dtype == in_windows.dtype == np.int32
