"""Where states of sequences lie: a slot for each state that is kept, found by block and position.

A state is named by the tokens before it: by the block of the last of them, and how many there are.
There are far fewer slots than blocks, for a state may take as much as thousands of tokens' KV.
The engine says which states are needed no more (`worker.engine.states`), and leaves enough slots
free for a step.  Bookkeeping only; the bytes are the cache's.  All that changes it is called by the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.contract import Run

Int32 = npt.NDArray[np.int32]


class StateSlots:
    """Numbers 0 to `num_slots` - 1, by block and position."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self._block_size = block_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, dict[int, int]] = {}  # by block, then by position

    @property
    def num_free(self) -> int:
        return len(self._free)

    def __contains__(self, block: int) -> bool:
        """Whether a state lies with a block."""
        return block in self._slots

    @property
    def blocks(self) -> frozenset[int]:
        """Those with which a state lies."""
        return frozenset(self._slots)

    def has(self, block: int, position: int) -> bool:
        """Whether the state after so many tokens is there, the last of them in this block."""
        return position in self._slots.get(block, ())

    def find(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return the slot of a sequence's state after so many tokens.

        Raises:
            ValueError: There is none.
        """
        block = self._block(block_table, position)
        slot = self._slots.get(block, {}).get(position)
        if slot is None:
            raise ValueError(f"there is no state after {position} tokens, in block {block}")
        return slot

    def take(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return a slot for the state after so many tokens; the same one if it is taken twice.

        Raises:
            IndexError: None is free.
        """
        of_block = self._slots.setdefault(self._block(block_table, position), {})
        if position not in of_block:
            of_block[position] = self._free.pop()
        return of_block[position]

    def forget(self, block: int, *, but: int | None = None) -> None:
        """Give back the slots of the states that lie with a block; not of that after `but`."""
        of_block = self._slots.pop(block, {})
        if but in of_block:
            self._slots[block] = {but: of_block.pop(but)}
        self._free.extend(of_block.values())

    def runs(self, query_starts: Int32, context_lens: Int32, block_tables: Int32) -> list[Run]:
        """Return the runs of a step, and take slots for the states behind them.

        What a sequence computes is one run; but if a block becomes full before its end and there is
        a slot to spare, the state behind the last such block is kept as well, so that others can go
        on from it: those with the same prompt, too, who have to compute its last token.

        Args:
            query_starts: [S + 1] the first row of each sequence, and the number of all.
            context_lens: [S] the tokens of each sequence, those of the step included.
            block_tables: [S, M].
        """
        # Each sequence needs one slot; what is left is for states at ends of blocks.
        spare = self.num_free - len(context_lens)
        runs: list[Run] = []
        rows = query_starts.tolist()
        for table, end, start, stop in zip(
            block_tables, context_lens.tolist(), rows, rows[1:], strict=False
        ):
            first, before = end - (stop - start), None
            if first:
                before = self.find(table, first)
                # A sequence that goes on from here needs nothing from before.
                self.forget(self._block(table, first), but=first)
            border = (end - 1) // self._block_size * self._block_size
            if first < border and spare > 0:
                spare -= 1
                cut, after = stop - (end - border), self.take(table, border)
                runs.append(Run(start, cut, before, after))
                start, before = cut, after
            runs.append(Run(start, stop, before, self.take(table, end)))
        return runs

    def _block(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return the block of the last of so many tokens."""
        return int(block_table[(position - 1) // self._block_size])
