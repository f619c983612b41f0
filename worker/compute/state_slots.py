"""The slots of sequences' states, found by block and position.

A state is identified by the tokens before it: the block of the last one, and their number.  There
are far fewer slots than blocks, as a state may be as large as the KV of thousands of tokens.  The
engine frees states (`worker.engine.states`) and leaves enough slots for a step.  This is only
bookkeeping, changed by the engine's thread alone; the cache has the bytes.
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
        return block in self._slots

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks that have a state."""
        return frozenset(self._slots)

    def has(self, block: int, position: int) -> bool:
        """Return whether there is a state after `position` tokens, the last one in this block."""
        return position in self._slots.get(block, ())

    def find(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return the slot of a sequence's state after so many tokens, or raise ValueError."""
        block = self._block(block_table, position)
        slot = self._slots.get(block, {}).get(position)
        if slot is None:
            raise ValueError(f"there is no state after {position} tokens, in block {block}")
        return slot

    def take(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return the slot for the state after so many tokens; IndexError if none is free."""
        of_block = self._slots.setdefault(self._block(block_table, position), {})
        if position not in of_block:
            of_block[position] = self._free.pop()
        return of_block[position]

    def forget(self, block: int, *, but: int | None = None) -> None:
        """Free the slots of a block's states, except the state after `but` tokens."""
        of_block = self._slots.pop(block, {})
        if but in of_block:
            self._slots[block] = {but: of_block.pop(but)}
        self._free.extend(of_block.values())

    def runs(self, query_starts: Int32, context_lens: Int32, block_tables: Int32) -> list[Run]:
        """Return the runs of a step, and take slots for the states at their ends.

        A sequence has one run; but if it fills a block before its end and there is a spare slot, a
        second run keeps the state at the end of its last full block for other sequences, also for
        those with the same prompt, which still compute its last token.

        Args:
            query_starts: [S + 1] the first row of each sequence, and the number of rows.
            context_lens: [S] the tokens of each sequence, including those of the step.
            block_tables: [S, M].
        """
        # Each sequence needs one slot; the others are for states at ends of blocks.
        spare = self.num_free - len(context_lens)
        runs: list[Run] = []
        rows = query_starts.tolist()
        for table, end, start, stop in zip(
            block_tables, context_lens.tolist(), rows, rows[1:], strict=False
        ):
            first, before = end - (stop - start), None
            if first:
                before = self.find(table, first)
                # A sequence that continues from here needs no earlier state.
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
        return int(block_table[(position - 1) // self._block_size])
