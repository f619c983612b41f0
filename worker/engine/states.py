"""Recurrent states: those from which sequences continue, and snapshots at the ends of blocks.

A sequence with blocks needs up to two slots: a step reads one and writes the other, so that a step
that fails can be repeated.  The other slots are for snapshots of the prefix cache; the least
recently used is evicted first.  States that are no longer needed keep their slots until `prepare`,
because they may still have to be swapped out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from worker.compute.contract import KVCache
from worker.compute.state_slots import StateSlots

# Identifies a state: the block table of a sequence and the number of tokens before the state.
StatePosition = tuple[Sequence[int], int]


class States:
    """Decides which states of a block pool are kept; each state is named by its last block."""

    def __init__(self, slots: StateSlots) -> None:
        if slots.num_slots < 2:
            raise ValueError(f"room for {slots.num_slots} states, a sequence needs 2")
        self.slots = slots
        self._num_sequences = 0
        self._held = Counter[int]()  # sequences that continue from the state of a block
        self._snapshots: dict[int, None] = {}  # the least recently used first
        self._unneeded: list[int] = []

    @property
    def has_room(self) -> bool:
        """True if there are enough slots for one more sequence."""
        return 2 * (self._num_sequences + 1) <= self.slots.num_slots

    def enter(self) -> None:
        """Count a sequence that was admitted: its blocks were allocated."""
        self._num_sequences += 1

    def leave(self, block: int | None) -> None:
        """Record that a sequence has freed its blocks and no longer needs the state of `block`."""
        self._num_sequences -= 1
        self.release(block)

    def hold(self, block: int | None) -> None:
        """Record that a sequence continues from the state of a block, if any."""
        if block is not None:
            self._held[block] += 1
            if block in self._snapshots:
                self._snapshots[block] = self._snapshots.pop(block)

    def release(self, block: int | None) -> None:
        """Record that a sequence no longer continues from the state of a block."""
        if block is not None:
            self._held[block] -= 1
            self._forget_if_unneeded(block)

    def keep(self, block: int) -> None:
        """Keep the state at the end of a block as a snapshot for the prefix cache."""
        self._snapshots[block] = None

    def is_kept(self, block: int) -> bool:
        return block in self._snapshots

    def drop(self, block: int) -> None:
        """Drop the snapshot of a block that is freed or no longer in the prefix cache."""
        self._snapshots.pop(block, None)
        self._forget_if_unneeded(block)

    def prepare(self, arriving: Collection[StatePosition], num_written: int) -> None:
        """Allocate slots for `arriving` states, and leave `num_written` slots free for the step.

        Slots of unneeded states are freed, then those of snapshots until there are enough.
        """
        for block in self._unneeded:
            self.slots.forget(block)
        self._unneeded.clear()
        for block in [*self._snapshots]:
            if self.slots.num_free >= len(arriving) + num_written:
                break
            if not self._held[block]:
                del self._snapshots[block]
                self.slots.forget(block)
        for block_table, position in arriving:
            self.slots.take(block_table, position)

    def check(self) -> None:
        """Assert that each stored state is needed or about to be freed, and that slots add up."""
        needed = {block for block, count in self._held.items() if count}
        needed |= {*self._snapshots, *self._unneeded}
        assert self.slots.blocks <= needed, f"states of {self.slots.blocks - needed} are kept"
        used = self.slots.num_slots - self.slots.num_free
        assert used == len(self.slots.blocks), f"{used} slots of {len(self.slots.blocks)} blocks"

    def _forget_if_unneeded(self, block: int) -> None:
        if not self._held[block]:
            del self._held[block]
            if block in self.slots and block not in self._snapshots:
                self._unneeded.append(block)


def states_of(cache: KVCache) -> States | None:
    """Return the states of a cache; None if no layer has a recurrent state."""
    return States(cache.state_slots) if cache.layout.has_state else None
