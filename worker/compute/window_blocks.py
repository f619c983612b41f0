"""Maps cache blocks to blocks of the window pool, which stores the KV of sliding-window layers.

Layers that see every position need a token's KV until the sequence ends; sliding-window layers need
it only until no later token attends to it.  So the window pool has far fewer blocks.  A cache block
that is still within a window has a counterpart there, its "window block", which the engine
allocates and frees (`worker.engine.windows`).  This is only bookkeeping, and only the engine's
thread changes it; transfer threads look up the blocks of their sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

# In a table of window blocks: the cache block has no window block.
NONE: Final = -1


class WindowBlocks:
    """Allocates window blocks 0 to `num_blocks` - 1 to cache blocks.

    If `num_blocks` is 0, each cache block always has the window block of the same number.
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
        """Return whether the cache block has a window block."""
        return bool(self._window_blocks[block] != NONE)

    def take(self, block: int) -> None:
        """Allocate a window block to a cache block; IndexError if none is free."""
        assert block not in self, f"block {block} has a window block"
        self._window_blocks[block] = self._free.pop()

    def forget(self, block: int) -> None:
        """Free the window block of a cache block."""
        assert block in self, f"block {block} has no window block"
        self._free.append(int(self._window_blocks[block]))
        self._window_blocks[block] = NONE

    def table(self, block_table: Sequence[int]) -> list[int]:
        """Return the window block, or `NONE`, of each block of a sequence."""
        found: list[int] = self._window_blocks[np.asarray(block_table, np.intp)].tolist()
        return found

    def of_step(self, slots: Int32, block_tables: Int32) -> tuple[Int32, Int32]:
        """Convert a step's KV slots and block tables to those of the window pool."""
        blocks, offsets = np.divmod(slots, self._block_size)
        return self._window_blocks[blocks] * self._block_size + offsets, self._window_blocks[
            block_tables
        ]
