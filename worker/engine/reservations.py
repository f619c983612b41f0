"""Reservations: sequences whose KV another worker computes.  They wait for blocks, then for the KV.

Who waits goes in order, except that a text whose beginning is on its way already, as with n choices
of one prompt, lets others pass until that is here, and shares its blocks then: neither bytes nor
blocks are spent twice.  It waits for nothing that its own KV would not wait for: the other is no
longer than itself, came first, and from the same peer.

Until a router has asked for it, KV is only what a peer says it is: it is shared with nobody, goes
behind what was asked for, and holds a part of the pool at most, by peer and in all.
"""

from __future__ import annotations

from collections import deque

from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence
from worker.engine.sharing import register
from worker.engine.unclaimed import Unclaimed


class Reservations:
    """Those that wait for blocks, in order, and those whose KV arrives."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._waiting: deque[Sequence] = deque()
        self._arriving: dict[int, Sequence] = {}
        self._unclaimed = Unclaimed(pool.num_blocks)  # blocks, but those shared with others

    def __len__(self) -> int:
        """How many wait for blocks."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def head(self) -> Sequence | None:
        """Return who is next to get blocks, if anybody is."""
        claimed = (s for s in self._waiting if s.is_claimed and not self._is_on_its_way(s))
        if (sequence := next(claimed, None)) is not None:
            return sequence
        may_hold = self._unclaimed.may_hold
        unclaimed = (s for s in self._waiting if not s.is_claimed and may_hold(s.offered_by))
        return next((s for s in unclaimed if not self._is_on_its_way(s)), None)

    def grant(self, sequence: Sequence) -> None:
        """It has its blocks: now its KV arrives."""
        self._waiting.remove(sequence)
        self._arriving[sequence.request_id] = sequence
        if not sequence.is_claimed:
            num_shared = sequence.num_cached_tokens // self._pool.block_size
            num_blocks = len(sequence.block_table) - num_shared
            self._unclaimed.hold(sequence.request_id, sequence.offered_by, num_blocks)

    def claim(self, sequence: Sequence) -> None:
        """A router has asked for it."""
        sequence.is_claimed = True
        self._unclaimed.release(sequence.request_id)

    def let_others_pass(self, sequence: Sequence) -> None:
        """Its KV is here and no router asks for it: nobody waits to share it."""
        self._arriving.pop(sequence.request_id, None)

    def begin(self, sequence: Sequence) -> None:
        """All its KV is here, and it is what a router asked for: others may share it."""
        self.remove(sequence)
        register(sequence, self._pool)

    def remove(self, sequence: Sequence) -> None:
        """It ended, wherever it was."""
        self._unclaimed.release(sequence.request_id)
        if self._arriving.pop(sequence.request_id, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)

    def _is_on_its_way(self, sequence: Sequence) -> bool:
        """Whether KV arrives, from its own peer, of a text that it begins with or equals."""
        if not self._pool.enable_prefix_cache:
            return False
        return any(
            other.offered_by == sequence.offered_by and _begins_with(sequence.token_ids, other)
            for other in self._arriving.values()
        )


def _begins_with(token_ids: list[int], other: Sequence) -> bool:
    count = other.num_tokens
    # The last token first: texts that begin alike for long are compared at length only if need be.
    is_likely = count <= len(token_ids) and token_ids[count - 1] == other.token_ids[-1]
    return is_likely and token_ids[:count] == other.token_ids
