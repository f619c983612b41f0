"""Reservations: sequences whose KV another worker computes.  They wait for blocks, then for KV.

Blocks are allocated in order of arrival, except that a sequence whose prefix is arriving from the
same peer (n choices of one prompt) waits until it can share those blocks.

A reservation is claimed once a router has requested it.  Until then its KV may be anything that a
peer chose to send: it is not shared, claimed reservations get blocks first, and unclaimed ones are
limited to a part of the pool, per peer and in total (SPEC 6.2).  A reservation that exceeds its
peer's limit is admitted, but displaced when a claimed sequence waits for blocks.  After the first
displacement, reservations that exceed a limit wait until they are claimed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Final

from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence

# Unclaimed transfers of one peer may use 1 / PEER_PART of the total, those of all peers together
# 1 / PART_OF_ALL, which leaves half of it to claimed transfers if peers misbehave.
PEER_PART: Final = 4
PART_OF_ALL: Final = 2


class Reservations:
    """The reservations that wait for blocks, in order, and those whose KV is arriving."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._waiting: deque[Sequence] = deque()
        self._arriving: dict[int, Sequence] = {}
        self.unclaimed = Unclaimed(pool.num_blocks)
        self._has_displaced = False  # ever

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def head(self) -> Sequence | None:
        """Return the next reservation to allocate blocks for, or None."""
        claimed = (s for s in self._waiting if s.is_claimed and not self._is_prefix_arriving(s))
        if (sequence := next(claimed, None)) is not None:
            return sequence
        unclaimed = (s for s in self._waiting if not s.is_claimed and self._may_hold(s))
        return next((s for s in unclaimed if not self._is_prefix_arriving(s)), None)

    def grant(self, sequence: Sequence) -> None:
        """Record that blocks were allocated for a reservation."""
        self._waiting.remove(sequence)
        self._arriving[sequence.request_id] = sequence
        if not sequence.is_claimed:
            amount = self._amount(sequence)
            self.unclaimed.hold(sequence.request_id, sequence.offered_by, amount)

    def claim(self, sequence: Sequence) -> None:
        """Record that a router has requested a reservation."""
        sequence.is_claimed = True
        self.unclaimed.release(sequence.request_id)

    def displace(self) -> list[int]:
        """Return the ids of reservations that must end, as a claimed one needs their blocks."""
        displaced = self.unclaimed.displace()
        self._has_displaced = self._has_displaced or bool(displaced)
        return displaced

    def let_others_pass(self, sequence: Sequence) -> None:
        """Stop other reservations from waiting to share this one, whose KV is complete."""
        self._arriving.pop(sequence.request_id, None)

    def begin(self, sequence: Sequence) -> None:
        """Put the complete KV of a claimed reservation into the prefix cache."""
        self.remove(sequence)
        sequence.register(self.pool)

    def remove(self, sequence: Sequence) -> None:
        """Stop tracking a sequence that ended or begins to decode."""
        self.unclaimed.release(sequence.request_id)
        if self._arriving.pop(sequence.request_id, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)

    def _may_hold(self, sequence: Sequence) -> bool:
        amount = self._amount(sequence) if self._has_displaced else 0
        return self.unclaimed.may_hold(sequence.offered_by, amount)

    def _amount(self, sequence: Sequence) -> int:
        """Return how many blocks to reserve for a sequence, shared ones included.

        If its share of the window blocks or of the state slots is larger, return that share,
        converted to blocks.
        """
        pool, num_tokens = self.pool, sequence.num_tokens
        num_blocks = amount = pool.blocks_for(num_tokens + 1)
        if (windows := pool.windows) is not None:
            num_windowed = num_blocks - windows.first_seen(num_tokens) // pool.block_size
            amount = max(amount, -(-num_windowed * pool.num_blocks // windows.blocks.num_blocks))
        if pool.states is not None:
            amount = max(amount, -(-2 * pool.num_blocks // pool.states.slots.num_slots))
        return amount

    def _is_prefix_arriving(self, sequence: Sequence) -> bool:
        """Return whether the KV of a prefix of the sequence is arriving from the same peer."""
        if not self.pool.enable_prefix_cache:
            return False
        return any(
            (other.offered_by, other.root) == (sequence.offered_by, sequence.root)
            and _begins_with(sequence.token_ids, other)
            for other in self._arriving.values()
        )


class Unclaimed:
    """Limits unclaimed transfers to parts of a `total`: blocks here, bytes in `worker.transfer`.

    A peer that has reached its limit gets no more, and no peer does once all peers together have
    reached theirs.  The transfer that exceeds a limit is still admitted, as it may be the only one.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[int, tuple[Hashable, int]] = {}  # by request id
        self.held_by = Counter[Hashable]()

    @property
    def num_held(self) -> int:
        return self.held_by.total()

    def may_hold(self, peer: Hashable, amount: int = 0) -> bool:
        """Return whether one more transfer of `peer` is admitted; 0 stands for any amount."""
        is_over = PEER_PART * (self.held_by[peer] + amount) >= self._total
        return not is_over and PART_OF_ALL * (self.num_held + amount) < self._total

    def hold(self, request_id: int, peer: Hashable, amount: int) -> None:
        self._held[request_id] = peer, amount
        self.held_by[peer] += amount

    def release(self, request_id: int) -> None:
        """Record that a transfer was claimed or has ended; idempotent."""
        if (held := self._held.pop(request_id, None)) is not None:
            peer, amount = held
            self.held_by[peer] -= amount
            if not self.held_by[peer]:
                del self.held_by[peer]

    def displace(self) -> list[int]:
        """Remove and return the youngest transfers of each peer until it is within its limit."""
        displaced = []
        for request_id, (peer, _) in reversed(list(self._held.items())):
            if PEER_PART * self.held_by[peer] > self._total:
                displaced.append(request_id)
                self.release(request_id)
        return displaced


def _begins_with(token_ids: list[int], other: Sequence) -> bool:
    count = other.num_tokens
    # The last token is compared first, because comparing all of them is slow.
    is_likely = count <= len(token_ids) and token_ids[count - 1] == other.token_ids[-1]
    return is_likely and token_ids[:count] == other.token_ids
