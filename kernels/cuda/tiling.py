"""Split attention into work items for thread blocks; NumPy only, once per step.

The rows of a sequence are its queries times the query heads that share a KV head.  Sequences of few
rows use a tile of 16 rows, and their keys are split until there are enough items to fill the
device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

# A shorter split costs more to merge than it gains: two tiles of keys.
MIN_SPLIT_KEYS = 128
# Shared memory that CUDA reserves for each thread block.
RESERVED_BYTES = 1 << 10
# Registers of a multiprocessor.
REGISTERS = 1 << 16
# Head sizes that are whole panels of 64 values, and leave registers for 128 keys.
WIDE_HEAD_DIMS = (64, 128)
# Columns of an item; see attention.cuh.
ITEM = 7


class Tile(NamedTuple):
    """The template arguments of `attend` after the dtype and D.

    Attributes:
        row_warps: Warps that divide the rows of a thread block.
        warp_matrices: Matrices of 16 rows that a warp has.
        key_warps: Warps that divide the keys of a tile.
        keys: Keys of a tile.
        stages: Tiles of keys in the ring.
    """

    row_warps: int
    warp_matrices: int
    key_warps: int
    keys: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.warp_matrices * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.key_warps

    def shared_bytes(self, head_dim: int) -> int:
        """Return the shared memory for the query tile and the ring, or the results after them."""
        tiles = (self.rows + self.stages * 2 * self.keys) * (head_dim + 8) * 2
        return max(tiles, self.rows * self.key_warps * (head_dim + 4) * 4)

    def registers(self, head_dim: int) -> int:
        """Return the most registers that a thread needs."""
        return 168 if self.warp_matrices == 1 and head_dim <= 128 else 256

    def kernel(self, dtype: str, head_dim: int) -> tuple[str, str]:
        """Return the source file and the C++ name of the instantiation."""
        return "attention", f"attend<{dtype},{head_dim},{','.join(map(str, self))}>"


class WideTile(NamedTuple):
    """The tile of `attend_wide`, whose third warpgroup copies; its numbers are constants there."""

    rows: int = 128
    keys: int = 128
    stages: int = 2
    threads: int = 384

    def shared_bytes(self, head_dim: int) -> int:
        """Return the size of tiles that are aligned to 1024 bytes, and of barriers."""
        return 1024 + (self.rows + self.stages * 2 * self.keys) * head_dim * 2 + self.stages * 4 * 8

    def registers(self, head_dim: int) -> int:
        """Return the registers of a thread at the start; warpgroups then redistribute them."""
        return 168

    def kernel(self, dtype: str, head_dim: int) -> tuple[str, str]:
        """Return the source file and the C++ name of the instantiation."""
        return "attention_hopper", f"attend_wide<{dtype},{head_dim}>"


AnyTile = Tile | WideTile


class Gpu(NamedTuple):
    """A device's multiprocessors and their memory, which decide tiles and splits.

    Attributes:
        shared_bytes: Shared memory of each multiprocessor.
        is_wide: Whether prompts use `attend_wide`, which only Hopper can run.
    """

    multiprocessors: int
    shared_bytes: int
    is_wide: bool = False

    def blocks(self, tile: AnyTile, head_dim: int) -> int:
        """Return how many thread blocks fit on a multiprocessor."""
        by_memory = self.shared_bytes // (tile.shared_bytes(head_dim) + RESERVED_BYTES)
        by_registers = REGISTERS // (tile.threads * tile.registers(head_dim))
        return max(1, min(by_memory, by_registers))

    def wanted_blocks(self, tile: AnyTile, head_dim: int) -> int:
        """Return how many thread blocks fill the device: keys are split to get near that number."""
        return self.multiprocessors * self.blocks(tile, head_dim)


class Work(NamedTuple):
    """The work items of one launch.

    Attributes:
        items: [I, ITEM] int32, one for each thread block; attention.cuh explains the columns.
        num_slots: How many partial results the items write.
    """

    items: Ints
    num_slots: int


def few_rows_tile(head_dim: int) -> Tile:
    """Return the tile for decode: all warps share 16 rows and divide the keys."""
    if head_dim > 128:
        return Tile(1, 1, 2, 32, 2)
    return Tile(1, 1, 4, 64, 3 if head_dim <= 96 else 2)


def many_rows_tile(head_dim: int, gpu: Gpu) -> AnyTile:
    """Return the tile for prompts.

    Warps of 32 rows read half as much shared memory per product as those of 16, but need more
    registers: 8 of them, in two thread blocks, are used if they fit on a multiprocessor.  Larger
    heads leave no registers for 32 rows.
    """
    if gpu.is_wide and head_dim in WIDE_HEAD_DIMS:
        return WideTile()
    if head_dim > 128:
        return Tile(4, 1, 1, 32, 2)
    for keys in (64, 32):
        tile = Tile(4, 2, 1, keys, 2)
        if gpu.blocks(tile, head_dim) >= 2:
            return tile
    return Tile(8, 1, 1, 32, 2)


def work(
    starts: Ints,
    contexts: Ints,
    sequences: npt.NDArray[np.intp],
    *,
    group: int,
    num_kv_heads: int,
    tile: AnyTile,
    window: int | None,
    wanted_blocks: int,
) -> Work:
    """Split some sequences of a batch into items of one tile of rows and one range of keys.

    Args:
        group: How many query heads share a KV head.
        wanted_blocks: Thread blocks that fill the device; keys are split to get near it.
    """
    tiles = [
        (sequence, row, *_keys(starts, contexts, sequence, row, group, tile, window))
        for sequence in sequences.tolist()
        for row in range(0, int(starts[sequence + 1] - starts[sequence]) * group, tile.rows)
    ]
    # The longest first: a long item that starts last would leave the device waiting for it.
    tiles.sort(key=lambda tile: tile[2] - tile[3])
    split = _split_keys([end - begin for _, _, begin, end in tiles], num_kv_heads, wanted_blocks)
    split = -(-split // tile.keys) * tile.keys
    items: list[tuple[int, ...]] = []
    num_slots = 0
    for sequence, row, begin, end in tiles:
        keys = range(begin, end, split)
        if len(keys) == 1:
            items.append((sequence, row, begin, end, -1, -1, 0))
            continue
        for slot, key in enumerate(keys, num_slots):
            part = key, min(key + split, end)
            items.append((sequence, row, *part, slot, num_slots, len(keys)))
        num_slots += len(keys)
    return Work(np.array(items, np.int32).reshape(-1, ITEM), num_slots)


def _keys(
    starts: Ints,
    contexts: Ints,
    sequence: int,
    row: int,
    group: int,
    tile: AnyTile,
    window: int | None,
) -> tuple[int, int]:
    """Return the range of keys that the rows of a tile see."""
    num_queries = int(starts[sequence + 1] - starts[sequence])
    first_position = int(contexts[sequence]) - num_queries
    last_row = min(row + tile.rows, num_queries * group) - 1
    begin = 0 if window is None else max(0, first_position + row // group - window + 1)
    return begin, first_position + last_row // group + 1


def _split_keys(lengths: list[int], num_kv_heads: int, wanted_blocks: int) -> int:
    """Return the shortest split, MIN_SPLIT_KEYS at least, that makes no more blocks than wanted."""
    low, high = MIN_SPLIT_KEYS, max([MIN_SPLIT_KEYS, *lengths])
    while low < high:
        middle = (low + high) // 2
        if sum(-(-length // middle) for length in lengths) * num_kv_heads > wanted_blocks:
            low = middle + 1
        else:
            high = middle
    return low
