"""Every row and key is somebody's work once, and the device is not flooded."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.cuda import tiling

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
    # A tile's slots follow each other, and no other tile has them.
    assert all(slots == list(range(t[2], t[2] + t[3])) for t, slots in tiles.items())
    assert sorted(slot for slots in tiles.values() for slot in slots) == list(range(work.num_slots))


def test_tiles_fit_the_smallest_shared_memory() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for tile in (tiling.few_rows_tile(head_dim), tiling.many_rows_tile(head_dim)):
            assert tile.shared_bytes(head_dim) <= 99 << 10
