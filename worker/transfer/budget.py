"""Divides --max-kv-inflight-bytes among incoming transfers.  No I/O.

Before a transfer may start, it reserves a share of this budget: the largest number of bytes that
it can have in flight.  It releases the share after its last byte.  Transfers start in order of
arrival, so that small ones cannot starve a large one.  Transfers that a router has claimed come
first, and all unclaimed ones together may only use a part of the budget: so a peer that offers KV
and never sends it cannot block other peers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker.engine.reservations import Unclaimed
from worker.transfer.incoming import IncomingTransfer


class TransferBudget:
    """A queue of transfers; calls `start(transfer)` once the transfer's share is reserved."""

    def __init__(self, budget_bytes: int, start: Callable[[IncomingTransfer], None]) -> None:
        self.free_bytes = budget_bytes
        self._start = start
        self._unclaimed = Unclaimed(budget_bytes)
        self._waiting: deque[IncomingTransfer] = deque()

    def __len__(self) -> int:
        """Return the number of queued transfers."""
        return len(self._waiting)

    def wait(self, transfer: IncomingTransfer) -> None:
        """Queue a transfer; start it once it is first and its share of the byte budget is free."""
        self._waiting.append(transfer)
        self._start_next()

    def claim(self, transfer: IncomingTransfer) -> None:
        """Record that a router has claimed the transfer, which may then start earlier."""
        self._unclaimed.release(transfer.receiver.request_id)
        self._start_next()

    def end(self, transfer: IncomingTransfer) -> None:
        """Release the transfer's share of the budget, or remove it from the queue.  Idempotent."""
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
