"""What transfers hold that no router has asked for: bounded by peer and in all.  SPEC 6.2.  Pure.

A peer whose transfers hold its part gets no more, and nobody does when those of all hold theirs.
What is one transfer over a part is let in: it may be the only one.  A router asks as soon as a
prompt is read, so an honest peer holds the few prompts that it reads just now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final

# One in so many: with two peers gone bad there is half left for what was asked for.
PEER_PART: Final = 4
PART_OF_ALL: Final = 2


class Unclaimed:
    """Holdings of unclaimed transfers, of `total` that there is."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: dict[int, tuple[Hashable, int]] = {}  # by request id
        self._by_peer = Counter[Hashable]()

    @property
    def num_held(self) -> int:
        return self._by_peer.total()

    def may_hold(self, peer: Hashable) -> bool:
        """Whether one more transfer of `peer` may hold something."""
        is_over = PEER_PART * self._by_peer[peer] >= self._total
        return not is_over and PART_OF_ALL * self.num_held < self._total

    def hold(self, request_id: int, peer: Hashable, amount: int) -> None:
        self._held[request_id] = peer, amount
        self._by_peer[peer] += amount

    def release(self, request_id: int) -> None:
        """It was claimed, or has ended; idempotent."""
        if (held := self._held.pop(request_id, None)) is not None:
            peer, amount = held
            self._by_peer[peer] -= amount
            if not self._by_peer[peer]:
                del self._by_peer[peer]
