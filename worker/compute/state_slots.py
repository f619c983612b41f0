"""Maps the recurrent states of sequences to slots of the state pool.

A state is identified by its position, which is the number of tokens before it, and by the cache
block of the last of these tokens.  There are far fewer slots than blocks, because one state may be
as large as the KV of thousands of tokens.  The engine frees states (`worker.engine.states`) so that
enough slots are free for a step.  This is only bookkeeping, and only the engine's thread changes
it; the KV cache stores the states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.contract import Run

Int32 = npt.NDArray[np.int32]


class StateSlots:
    """Allocates slots 0 to `num_slots` - 1 to states, which are keyed by block and position."""

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
        """Return whether there is a state at `position` whose last token is in this block."""
        return position in self._slots.get(block, ())

    def find(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return the slot of a sequence's state at `position`; ValueError if there is none."""
        block = self._block(block_table, position)
        slot = self._slots.get(block, {}).get(position)
        if slot is None:
            raise ValueError(f"there is no state after {position} tokens, in block {block}")
        return slot

    def take(self, block_table: Sequence[int] | Int32, position: int) -> int:
        """Return, or allocate, the slot for the state at `position`; IndexError if none is free."""
        by_position = self._slots.setdefault(self._block(block_table, position), {})
        if position not in by_position:
            by_position[position] = self._free.pop()
        return by_position[position]

    def forget(self, block: int, *, but: int | None = None) -> None:
        """Free the slots of a block's states, except for the state at position `but`."""
        by_position = self._slots.pop(block, {})
        if but in by_position:
            self._slots[block] = {but: by_position.pop(but)}
        self._free.extend(by_position.values())

    def runs(self, query_starts: Int32, context_lens: Int32, block_tables: Int32) -> list[Run]:
        """Split a step into segments (`Run`), and allocate a slot for the state after each one.

        A sequence has one segment, or two if it crosses a block boundary and a slot is spare: then
        its state at its last full block is kept for prefix-cache reuse.  That block excludes the
        last token, which a request with the same prompt still computes.

        Args:
            query_starts: [S + 1] first row of each of S sequences, then the number of rows.
            context_lens: [S] number of tokens of each sequence, including those of this step.
            block_tables: [S, M] block numbers of each sequence.
        """
        # Each sequence needs one slot; the remaining ones are for checkpoints.
        spare = self.num_free - len(context_lens)
        runs: list[Run] = []
        rows = query_starts.tolist()
        for table, end, start, stop in zip(
            block_tables, context_lens.tolist(), rows, rows[1:], strict=False
        ):
            first, before = end - (stop - start), None
            if first:
                before = self.find(table, first)
                # The sequence continues from here and needs no earlier state in this block.
                self.forget(self._block(table, first), but=first)
            boundary = (end - 1) // self._block_size * self._block_size
            if first < boundary and spare > 0:
                spare -= 1
                split, checkpoint = stop - (end - boundary), self.take(table, boundary)
                runs.append(Run(start, split, before, checkpoint))
                start, before = split, checkpoint
            runs.append(Run(start, stop, before, self.take(table, end)))
        return runs

    def _block(self, block_table: Sequence[int] | Int32, position: int) -> int:
        return int(block_table[(position - 1) // self._block_size])
