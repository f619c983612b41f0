"""Offers take turns at the bytes that may be in flight to this worker (--max-kv-inflight-bytes).

Each takes a share when its turn comes, as much as may ever be on its way at once, and gives it back
after its last byte.  The oldest comes first: a small one does not overtake a large one for ever.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from wire.transfer import KVReceiver


class Reception:
    """One KV cache that arrives from `peer`, until it is claimed or has failed.

    `wanted_bytes` of it are in flight at once, at most.
    """

    __slots__ = ("block_table", "is_dropped", "peer", "receiver", "share_bytes", "wanted_bytes")

    def __init__(self, peer: bytes, receiver: KVReceiver, credit_bytes: int) -> None:
        total_bytes = receiver.num_tokens * receiver.layout.token_bytes
        self.peer = peer
        self.receiver = receiver
        self.wanted_bytes = min(credit_bytes, total_bytes)
        self.share_bytes = 0  # of the bytes in flight, from its turn until its last byte
        self.is_dropped = False
        self.block_table: tuple[int, ...] = ()


class Turns:
    """`free_bytes` are nobody's share; `start(reception)` is called when its turn has come."""

    def __init__(self, budget_bytes: int, start: Callable[[Reception], None]) -> None:
        self.free_bytes = budget_bytes
        self._start = start
        self._waiting: deque[Reception] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __contains__(self, reception: Reception) -> bool:
        """Whether it waits."""
        return reception in self._waiting

    def wait(self, reception: Reception) -> None:
        """Start it as soon as it is the oldest and its share is to be had: now, if it can be."""
        self._waiting.append(reception)
        self._start_next()

    def end(self, reception: Reception) -> None:
        """Nothing more of it will come: give its share back, or its place; idempotent."""
        if reception in self._waiting:
            self._waiting.remove(reception)
        self.free_bytes += reception.share_bytes
        reception.share_bytes = 0
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and self._waiting[0].wanted_bytes <= self.free_bytes:
            reception = self._waiting.popleft()
            reception.share_bytes = reception.wanted_bytes
            self.free_bytes -= reception.share_bytes
            self._start(reception)
