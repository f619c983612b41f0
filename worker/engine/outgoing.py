"""Sequences whose KV is sent hold only a part of the blocks if this worker receives KV too.

Two workers that are full of KV for each other would wait for each other's blocks, until the leases
of the transfers end.  A sequence that needs more than the part is sent alone.
"""

from __future__ import annotations

from typing import Final

from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence

# The part is 1 / PART of all blocks.
PART: Final = 2


class Outgoing:
    """The sequences with blocks that have a transfer; limited if this worker `receives_kv`."""

    def __init__(self, pool: BlockPool, *, receives_kv: bool) -> None:
        self._pool, self._is_limited = pool, receives_kv
        self._sequences: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that has got its blocks, if it has a transfer."""
        if sequence.transfer:
            self._sequences.add(sequence)

    def discard(self, sequence: Sequence) -> None:
        self._sequences.discard(sequence)

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may get its blocks without exceeding the limit."""
        if not (self._is_limited and sequence.transfer and self._sequences):
            return True
        num_blocks = self._pool.blocks_for(sequence.num_tokens)
        num_blocks += sum(len(each.block_table) for each in self._sequences)
        return PART * num_blocks <= self._pool.num_blocks
