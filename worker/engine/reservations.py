"""Reservations: sequences whose KV another worker computes.  They wait for blocks, then for the KV.

They get blocks in order, with one exception.  While KV arrives that a sequence begins with, as with
n choices of one prompt, the sequence lets others pass, and shares those blocks when the KV is here:
so neither bytes nor blocks are spent twice.  This costs it no time, for the other sequence is no
longer, came first, and its KV comes from the same peer.

A reservation is claimed when a router has asked for it.  Until then the KV may be anything that a
peer chose to send: no other sequence shares it, claimed ones get blocks first, and unclaimed ones
hold a part of the pool at most, by peer and in all (SPEC 6.2).  One that exceeds its peer's part is
let in all the same, and has to end when a claimed sequence waits.  Once that has happened, no such
one is let in any more before it is claimed: so nobody is displaced again and again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Final

from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence

# One peer may hold a quarter, all together half: two bad peers leave half to claimed transfers.
PEER_PART: Final = 4
PART_OF_ALL: Final = 2


class Reservations:
    """The sequences that wait for blocks, in order, and those whose KV arrives."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._waiting: deque[Sequence] = deque()
        self._arriving: dict[int, Sequence] = {}
        self.unclaimed = Unclaimed(pool.num_blocks)
        self._has_displaced = False  # ever

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
        unclaimed = (s for s in self._waiting if not s.is_claimed and self._may_hold(s))
        return next((s for s in unclaimed if not self._is_on_its_way(s)), None)

    def grant(self, sequence: Sequence) -> None:
        """Enter that the sequence got its blocks, so its KV may arrive."""
        self._waiting.remove(sequence)
        self._arriving[sequence.request_id] = sequence
        if not sequence.is_claimed:
            amount = self._amount(sequence)
            self.unclaimed.hold(sequence.request_id, sequence.offered_by, amount)

    def claim(self, sequence: Sequence) -> None:
        """Enter that a router has asked for it."""
        sequence.is_claimed = True
        self.unclaimed.release(sequence.request_id)

    def displace(self) -> list[int]:
        """Return the requests that have to end, once: a claimed sequence waits for their blocks."""
        displaced = self.unclaimed.displace()
        self._has_displaced = self._has_displaced or bool(displaced)
        return displaced

    def let_others_pass(self, sequence: Sequence) -> None:
        """Have no sequence wait to share it: its KV is here, but no router has asked for it."""
        self._arriving.pop(sequence.request_id, None)

    def begin(self, sequence: Sequence) -> None:
        """Let others share its KV: all of it is here, and a router has asked for it."""
        self.remove(sequence)
        sequence.register(self.pool)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or began to generate."""
        self.unclaimed.release(sequence.request_id)
        if self._arriving.pop(sequence.request_id, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)

    def _may_hold(self, sequence: Sequence) -> bool:
        amount = self._amount(sequence) if self._has_displaced else 0
        return self.unclaimed.may_hold(sequence.offered_by, amount)

    def _amount(self, sequence: Sequence) -> int:
        """Return how many blocks it needs, or the same part of the pool as it needs of what else
        sequences hold, if that is more: blocks of layers with a window, and states.

        Blocks that it shares count too: while it holds them nobody gets them, whoever ends.
        """
        pool, num_tokens = self.pool, sequence.num_tokens
        num_blocks = amount = pool.blocks_for(num_tokens + 1)
        if (windows := pool.windows) is not None:
            reached = num_blocks - windows.first_seen(num_tokens) // pool.block_size
            amount = max(amount, -(-reached * pool.num_blocks // windows.blocks.num_blocks))
        if pool.states is not None:
            amount = max(amount, -(-2 * pool.num_blocks // pool.states.slots.num_slots))
        return amount

    def _is_on_its_way(self, sequence: Sequence) -> bool:
        """Whether KV arrives from the same peer for tokens that the sequence begins with."""
        if not self.pool.enable_prefix_cache:
            return False
        return any(
            other.offered_by == sequence.offered_by and _begins_with(sequence.token_ids, other)
            for other in self._arriving.values()
        )


class Unclaimed:
    """How much of a `total` unclaimed transfers hold: blocks here, bytes in `worker.transfer`.

    A peer whose transfers hold its part gets no more, and no peer does when all together hold
    theirs.  The transfer that exceeds a part is still let in, for it may be the only one.  A router
    asks as soon as a prompt is read, so an honest peer holds few.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[int, tuple[Hashable, int]] = {}  # by request id
        self.held_by = Counter[Hashable]()

    @property
    def num_held(self) -> int:
        return self.held_by.total()

    def may_hold(self, peer: Hashable, amount: int = 0) -> bool:
        """Whether one more transfer of `peer` may hold something: anything, or this amount."""
        is_over = PEER_PART * (self.held_by[peer] + amount) >= self._total
        return not is_over and PART_OF_ALL * (self.num_held + amount) < self._total

    def hold(self, request_id: int, peer: Hashable, amount: int) -> None:
        self._held[request_id] = peer, amount
        self.held_by[peer] += amount

    def release(self, request_id: int) -> None:
        """Enter that it was claimed or has ended; nothing happens the second time."""
        if (held := self._held.pop(request_id, None)) is not None:
            peer, amount = held
            self.held_by[peer] -= amount
            if not self.held_by[peer]:
                del self.held_by[peer]

    def displace(self) -> list[int]:
        """Forget the youngest transfers of each peer that holds more than its part; return them."""
        displaced = []
        for request_id, (peer, _) in reversed(list(self._held.items())):
            if PEER_PART * self.held_by[peer] > self._total:
                displaced.append(request_id)
                self.release(request_id)
        return displaced


def _begins_with(token_ids: list[int], other: Sequence) -> bool:
    count = other.num_tokens
    # The last token first: it nearly always tells, and the whole comparison is long.
    is_likely = count <= len(token_ids) and token_ids[count - 1] == other.token_ids[-1]
    return is_likely and token_ids[:count] == other.token_ids
