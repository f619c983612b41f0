"""Divides the bytes that may be in flight to this worker among offers.  Pure.

An offer takes a share of --max-kv-inflight-bytes, its most bytes in flight, and returns it after
its last byte.  The oldest is first, so that small ones do not pass a large one for ever.  Offers
that a router has claimed come before the others, which hold only a part of the bytes together: a
peer that offers KV and never sends it blocks nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker.engine.reservations import Unclaimed
from worker.transfer.incoming import IncomingTransfer


class TransferBudget:
    """Divides `free_bytes` among transfers; calls `start(transfer)` when it has its share."""

    def __init__(self, budget_bytes: int, start: Callable[[IncomingTransfer], None]) -> None:
        self.free_bytes = budget_bytes
        self._start = start
        self._unclaimed = Unclaimed(budget_bytes)
        self._waiting: deque[IncomingTransfer] = deque()

    def __len__(self) -> int:
        """Return the number of transfers that wait."""
        return len(self._waiting)

    def wait(self, transfer: IncomingTransfer) -> None:
        """Start it, perhaps now, when it is the oldest that may start and its share is free."""
        self._waiting.append(transfer)
        self._start_next()

    def claim(self, transfer: IncomingTransfer) -> None:
        """Note that a router has claimed it."""
        self._unclaimed.release(transfer.receiver.request_id)
        self._start_next()

    def end(self, transfer: IncomingTransfer) -> None:
        """Return its share, or remove it from those that wait; idempotent."""
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
