"""State of one incoming KV transfer, and the functions that store its segments in blocks."""

from __future__ import annotations

import threading

from wire.errors import WireError
from wire.parts import Buffer
from wire.timeline import Entry, Kind
from wire.transfer import MAX_SEGMENT_BYTES, KVReceiver, Segment
from worker.compute.contract import KVCache, Memory
from worker.engine.windows import unpack
from worker.transfer.in_memory import fetch


class Arrival:
    """A segment that was admitted before its bytes arrived.

    Either a thread stores the segment, or the event loop drops it and frees its blocks: the one
    that calls `acquire` first.
    """

    __slots__ = ("_acquired", "segment", "transfer")

    def __init__(self, transfer: IncomingTransfer, segment: Segment) -> None:
        self.transfer, self.segment = transfer, segment
        self._acquired = threading.Lock()

    def acquire(self) -> bool:
        """Return True for the first call only.  Thread-safe."""
        return self._acquired.acquire(blocking=False)


class IncomingTransfer:
    """A transfer from `peer`, until the decode role takes the KV over or the transfer fails.

    While `is_waited_for` is true, requests with an equal prompt may wait to share this KV.
    """

    def __init__(self, peer: bytes, receiver: KVReceiver) -> None:
        self.peer = peer
        self.receiver = receiver
        self.share_bytes = 0  # reserved in the `TransferBudget`, 0 before and after
        self.acked_bytes = 0
        self.arrivals: set[Arrival] = set()  # from segment connections, until they are stored
        self.is_dropped = False
        self.is_waited_for = True
        self.block_table: tuple[int, ...] = ()
        self.memory: Memory | None = None  # mapped from the peer, if segments may be read there
        self.unasked: list[tuple[Buffer, Buffer]] = []  # KV from the offer, until it has blocks

    @property
    def wanted_bytes(self) -> int:
        """The largest number of bytes that this transfer can have in flight."""
        return max(1, min(self.receiver.credit_bytes, self.receiver.total_bytes))

    @property
    def is_ack_due(self) -> bool:
        """Whether an ACK must be sent now, before the sender lacks credit for its next segment."""
        unacked_bytes = self.receiver.kv_bytes - self.acked_bytes
        return unacked_bytes >= min(self.wanted_bytes / 4, self.wanted_bytes - MAX_SEGMENT_BYTES)


def transfer_entries(receiver: KVReceiver) -> list[Entry]:
    """Return the timeline entries of a transfer that is complete, and of its first segments."""
    if receiver.accepted_at is None or not receiver.num_segments:
        return []
    start_s, seconds = receiver.accepted_at, receiver.kv_seconds
    return [
        Entry(Kind.TRANSFER, start_s, seconds, receiver.num_segments),
        *(
            Entry(Kind.SEGMENT, arrived, stored - arrived, num_bytes)
            for arrived, stored, num_bytes in receiver.segment_times
        ),
    ]


def store(cache: KVCache, transfer: IncomingTransfer, segment: Segment) -> Exception | None:
    """Verify a segment and store it in its blocks; return the error, if any.  Thread-safe."""
    receiver, block_table = transfer.receiver, transfer.block_table
    try:
        if receiver.is_over:
            return None
        if segment.places:
            assert transfer.memory is not None
            fetch(cache, block_table, receiver, segment, transfer.memory)
            return None
        if segment.is_sealed:
            segment = receiver.opened(segment)
        else:
            receiver.verify(segment)
        unpack(cache, block_table, segment.rectangle, segment.kv, receiver.num_tokens)
    except WireError as error:
        # A copy without traceback: the transfer keeps the error, and the stack frames in the
        # original's traceback would keep the peer's memory mapped.
        return WireError(error.code, error.message)
    except Exception as problem:
        return problem
    return None


def store_all(
    cache: KVCache, batch: list[tuple[IncomingTransfer, Segment]]
) -> list[Exception | None]:
    """Store segments in order; return an error or None for each."""
    return [store(cache, *each) for each in batch]
