"""Divides the bytes that may be in flight to this worker among offers, in turn.

Each takes a share of --max-kv-inflight-bytes when its turn comes, as much as it may have on its way
at once, and gives it back after its last byte.  The oldest comes first, so that small ones do not
pass a large one for ever.  But those that a router has asked for come before the others, and the
others together hold a part of the bytes at most: a peer that offers KV and does not send it stops
nobody else.  Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker.engine.reservations import Unclaimed
from worker.transfer.incoming import IncomingTransfer


class TransferBudget:
    """Shares `free_bytes` among transfers; calls `start(transfer)` in its turn."""

    def __init__(self, budget_bytes: int, start: Callable[[IncomingTransfer], None]) -> None:
        self.free_bytes = budget_bytes
        self._start = start
        self._unclaimed = Unclaimed(budget_bytes)
        self._waiting: deque[IncomingTransfer] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __contains__(self, transfer: IncomingTransfer) -> bool:
        """Whether it waits."""
        return transfer in self._waiting

    def wait(self, transfer: IncomingTransfer) -> None:
        """Start it when it is the oldest that may start and its share is free, perhaps now."""
        self._waiting.append(transfer)
        self._start_next()

    def claim(self, transfer: IncomingTransfer) -> None:
        """A router has asked for it."""
        self._unclaimed.release(transfer.receiver.request_id)
        self._start_next()

    def end(self, transfer: IncomingTransfer) -> None:
        """Nothing more of it will come: give its share back, or its place; idempotent."""
        if transfer in self._waiting:
            self._waiting.remove(transfer)
        self.free_bytes += transfer.share_bytes
        transfer.share_bytes = 0
        self._unclaimed.release(transfer.receiver.request_id)
        self._start_next()

    def _start_next(self) -> None:
        while (transfer := self._next()) and transfer.wanted_bytes <= self.free_bytes:
            self._waiting.remove(transfer)
            transfer.share_bytes = transfer.wanted_bytes
            self.free_bytes -= transfer.share_bytes
            if not transfer.receiver.is_claimed:
                request_id = transfer.receiver.request_id
                self._unclaimed.hold(request_id, transfer.peer, transfer.share_bytes)
            self._start(transfer)

    def _next(self) -> IncomingTransfer | None:
        claimed = (each for each in self._waiting if each.receiver.is_claimed)
        if (transfer := next(claimed, None)) is not None:
            return transfer
        return next((e for e in self._waiting if self._unclaimed.may_hold(e.peer)), None)
