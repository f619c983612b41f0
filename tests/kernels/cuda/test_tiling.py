"""Every row and key is somebody's work once, and the device is not flooded."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cuda import tiling
from tests.kernels.instances import SHARED_BYTES

LENS = st.lists(
    st.tuples(st.integers(1, 900), st.integers(1, 70)).map(lambda n: (max(n), n[1])),
    min_size=1,
    max_size=5,
)


@given(LENS, st.sampled_from([1, 3, 8]), st.sampled_from([None, 1, 50]), st.integers(1, 200))
def test_items_cover_what_rows_see(
    lens: list[tuple[int, int]], group: int, window: int | None, wanted: int
) -> None:
    starts = np.cumsum([0, *(queries for _, queries in lens)]).astype(np.int32)
    contexts = np.array([context for context, _ in lens], np.int32)
    tile = tiling.few_rows_tile(64)
    work = tiling.work(
        starts,
        contexts,
        np.arange(len(lens)),
        group=group,
        num_kv_heads=2,
        tile=tile,
        window=window,
        wanted_blocks=wanted,
    )
    for sequence, (context, queries) in enumerate(lens):
        for row in range(0, queries * group, 7):
            position = context - queries + row // group
            first = 0 if window is None else max(0, position - window + 1)
            mine = [
                item
                for item in work.items.tolist()
                if item[0] == sequence and item[1] == row - row % tile.rows
            ]
            keys = sorted(key for item in mine for key in range(item[2], item[3]))
            assert len(keys) == len(set(keys)) and set(range(first, position + 1)) <= set(keys)
            assert keys[-1] < context
    tiles: dict[tuple[int, ...], list[int]] = {}
    for sequence, row, _, _, slot, *of_tile in work.items.tolist():
        if slot >= 0:
            tiles.setdefault((sequence, row, *of_tile), []).append(slot)
    # A tile of keys that ends in a row's midst would count what is not there: see attention.cu.
    parts = [item for item in work.items.tolist() if item[4] >= 0]
    for item, after in pairwise(parts):
        num_keys = after[2] - item[2]
        is_whole = num_keys >= tiling.MIN_SPLIT_KEYS and num_keys % tile.keys == 0
        assert item[5] != after[5] or is_whole
    # A tile's slots follow each other, and no other tile has them.
    assert all(slots == list(range(t[2], t[2] + t[3])) for t, slots in tiles.items())
    assert sorted(slot for slots in tiles.values() for slot in slots) == list(range(work.num_slots))


HEAD_DIMS = (64, 80, 96, 128, 256)


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_tiles_fit_a_multiprocessor(architecture: str) -> None:
    gpu = tiling.Gpu(1, SHARED_BYTES[architecture])
    for head_dim in HEAD_DIMS:
        for tile in (tiling.few_rows_tile(head_dim), tiling.many_rows_tile(head_dim, gpu)):
            needed = tile.shared_bytes(head_dim) + tiling.RESERVED_BYTES
            assert needed * gpu.blocks(tile, head_dim) <= gpu.shared_bytes
        if head_dim <= 128:  # eight warps to hide what one waits for; sm_89 has no room for more
            assert gpu.blocks(tile, head_dim) * tile.threads >= 256


def test_generation_of_16_times_1k_fills_an_h100_in_one_wave() -> None:
    tile, h100 = tiling.few_rows_tile(128), tiling.Gpu(132, SHARED_BYTES["sm_90"])
    ones, contexts = np.arange(17, dtype=np.int32), np.full(16, 1024, np.int32)
    wanted = h100.wanted_blocks(tile, 128)
    work = tiling.work(
        ones,
        contexts,
        np.arange(16),
        group=8,
        num_kv_heads=4,
        tile=tile,
        window=None,
        wanted_blocks=wanted,
    )
    assert 0.95 * wanted < 4 * len(work.items) <= wanted
