"""The blocks of layers with a window, which have a pool of their own.

Layers that see every position keep a token's KV for as long as the sequence lives, those with a
window only until no later token sees it.  So their pool has far fewer blocks: each block of the
cache that a window still reaches has a copy there.  The engine decides when
(`worker.engine.windows`).  This is only bookkeeping, changed by the engine's thread alone; threads
that copy KV look up the blocks of their sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

# The window block of a block that no window reaches.
NONE: Final = -1


class WindowBlocks:
    """Numbers 0 to `num_blocks` - 1 of the window pool, by block of the cache.

    With `num_blocks` 0 each block of the cache always has one.
    """

    def __init__(self, num_cache_blocks: int, block_size: int, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks or num_cache_blocks
        self.is_fixed = num_blocks == 0
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        numbers = np.arange(num_cache_blocks, dtype=np.int32)
        self._window_blocks: Int32 = np.full_like(numbers, NONE) if num_blocks else numbers

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, block: int) -> bool:
        """Return whether the block has a window block."""
        return bool(self._window_blocks[block] != NONE)

    def take(self, block: int) -> None:
        """Give a block a window block; IndexError if none is free."""
        assert block not in self, f"block {block} has a window block"
        self._window_blocks[block] = self._free.pop()

    def forget(self, block: int) -> None:
        """Free the window block of a block."""
        assert block in self, f"block {block} has no window block"
        self._free.append(int(self._window_blocks[block]))
        self._window_blocks[block] = NONE

    def table(self, block_table: Sequence[int]) -> list[int]:
        """Return the window blocks of a sequence's blocks, or `NONE`."""
        found: list[int] = self._window_blocks[np.asarray(block_table, np.intp)].tolist()
        return found

    def of_step(self, slots: Int32, block_tables: Int32) -> tuple[Int32, Int32]:
        """Return the slots and block tables of a step in the window pool."""
        blocks, offsets = np.divmod(slots, self._block_size)
        return self._window_blocks[blocks] * self._block_size + offsets, self._window_blocks[
            block_tables
        ]
