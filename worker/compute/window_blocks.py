"""Where KV of layers with a window lies: beside a block, in a block of a pool of their own.

Layers that see every position keep a token's KV for as long as the sequence lives, those with a
window only until no later token reaches it.  So they have a pool of their own with far fewer
blocks: one lies beside each block that a window still reaches, and goes when none does.  The engine
says when (`worker.engine.windows`).  Bookkeeping only; the bytes are the cache's.  The engine's
thread alone changes it; threads that copy KV look up the blocks of their sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

# Beside a block that no window reaches.
NONE: Final = -1


class WindowBlocks:
    """Numbers 0 to `num_blocks` - 1 of the pool of layers with a window, by the block beside.

    With `num_blocks` 0 each block of the cache has one beside it for ever, as suits whoever does
    not ask which a window reaches.
    """

    def __init__(self, num_cache_blocks: int, block_size: int, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks or num_cache_blocks
        self.is_fixed = num_blocks == 0
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        numbers = np.arange(num_cache_blocks, dtype=np.int32)
        self._beside: Int32 = np.full_like(numbers, NONE) if num_blocks else numbers

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, block: int) -> bool:
        """Whether one lies beside a block."""
        return bool(self._beside[block] != NONE)

    def take(self, block: int) -> None:
        """Put a free one beside a block that has none.

        Raises:
            IndexError: None is free.
        """
        assert block not in self, f"block {block} has one beside it"
        self._beside[block] = self._free.pop()

    def forget(self, block: int) -> None:
        """Give back the one beside a block."""
        assert block in self, f"block {block} has none beside it"
        self._free.append(int(self._beside[block]))
        self._beside[block] = NONE

    def table(self, block_table: Sequence[int]) -> list[int]:
        """Return those beside the blocks of a sequence, `NONE` where there is none."""
        found: list[int] = self._beside[np.asarray(block_table, np.intp)].tolist()
        return found

    def of_step(self, slots: Int32, block_tables: Int32) -> tuple[Int32, Int32]:
        """Return slots and block tables of a step as layers with a window have them."""
        blocks, offsets = np.divmod(slots, self._block_size)
        return self._beside[blocks] * self._block_size + offsets, self._beside[block_tables]
