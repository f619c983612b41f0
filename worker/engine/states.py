"""Which states are kept: those that sequences go on from, and snapshots at the ends of blocks.

A sequence that holds blocks may need two slots: its state is read, and the next one written beside
it, so that a step that fails can be computed again.  So many sequences as have two slots each may
hold blocks.  What they leave is for snapshots, by which others that begin alike need not compute
the beginning; those not used for longest go first.

What is needed no more keeps its slot until `prepare`: a state that is swapped out is copied
by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from worker.compute.contract import KVCache
from worker.compute.state_slots import StateSlots

# Where a state is to lie: a block table, and how many tokens come before.
Place = tuple[Sequence[int], int]


class States:
    """The states of one pool of blocks, by the block that each lies with."""

    def __init__(self, slots: StateSlots) -> None:
        if slots.num_slots < 2:
            raise ValueError(f"room for {slots.num_slots} states, a sequence needs 2")
        self.slots = slots
        self._num_sequences = 0
        self._held = Counter[int]()  # how many sequences go on from the state with a block
        self._snapshots: dict[int, None] = {}  # the least recently used first
        self._unneeded: list[int] = []

    @property
    def has_room(self) -> bool:
        """Whether one more sequence may hold blocks."""
        return 2 * (self._num_sequences + 1) <= self.slots.num_slots

    def enter(self) -> None:
        """A sequence gets blocks."""
        self._num_sequences += 1

    def leave(self, block: int | None) -> None:
        """A sequence gives its blocks back, and goes on no more from the state with `block`."""
        self._num_sequences -= 1
        self.release(block)

    def hold(self, block: int | None) -> None:
        """A sequence goes on from the state with a block; None: from none."""
        if block is not None:
            self._held[block] += 1
            if block in self._snapshots:
                self._snapshots[block] = self._snapshots.pop(block)

    def release(self, block: int | None) -> None:
        """A sequence goes on from another."""
        if block is not None:
            self._held[block] -= 1
            self._forget_if_unneeded(block)

    def keep(self, block: int) -> None:
        """Let others go on from the state at the end of a block."""
        self._snapshots[block] = None

    def is_kept(self, block: int) -> bool:
        """Whether others may go on from the end of a block."""
        return block in self._snapshots

    def drop(self, block: int) -> None:
        """Nobody can find a block any more, or it is given back."""
        self._snapshots.pop(block, None)
        self._forget_if_unneeded(block)

    def prepare(self, arriving: Collection[Place], num_written: int) -> None:
        """Take slots for states that arrive, and leave so many free for those that a step writes.

        What is needed no more gives its slots back, and snapshots do until there are enough.
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
        """Assert that each state that is kept is needed, or about to be forgotten; one a block."""
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
    """Return the states of an executor's cache; None if no layer keeps one."""
    return States(cache.state_slots) if cache.layout.has_state else None
