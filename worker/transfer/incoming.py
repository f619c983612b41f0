"""One incoming KV cache: its transfer, and the path of its segments into blocks."""

from __future__ import annotations

import threading

from wire.errors import WireError
from wire.parts import Buffer
from wire.transfer import MAX_SEGMENT_BYTES, KVReceiver, Segment
from worker.compute.contract import KVCache, Memory
from worker.engine.windows import unpack
from worker.transfer.in_memory import fetch


class Arrival:
    """A segment that was admitted before its bytes arrived.

    Either a thread stores it or the loop drops it and frees its blocks: the first to `settle` it.
    """

    __slots__ = ("_settled", "segment", "transfer")

    def __init__(self, transfer: IncomingTransfer, segment: Segment) -> None:
        self.transfer, self.segment = transfer, segment
        self._settled = threading.Lock()

    def settle(self) -> bool:
        """Return True to the first caller, on any thread."""
        return self._settled.acquire(blocking=False)


class IncomingTransfer:
    """One KV cache that arrives from `peer`, until it is taken or has failed.

    While it `is_waited_for`, equal prompts may wait for its KV.
    """

    __slots__ = (
        "acked_bytes",
        "arrivals",
        "block_table",
        "is_dropped",
        "is_waited_for",
        "memory",
        "peer",
        "receiver",
        "share_bytes",
        "unasked",
    )

    def __init__(self, peer: bytes, receiver: KVReceiver) -> None:
        self.peer = peer
        self.receiver = receiver
        self.share_bytes = 0  # of the bytes in flight, from its turn until its last byte
        self.acked_bytes = 0
        self.arrivals: set[Arrival] = set()  # on connections of their own, until stored
        self.is_dropped = False
        self.is_waited_for = True
        self.block_table: tuple[int, ...] = ()
        self.memory: Memory | None = None  # the peer's, if segments may lie there
        self.unasked: list[tuple[Buffer, Buffer]] = []  # its KV, until there are blocks for it

    @property
    def wanted_bytes(self) -> int:
        """Its bytes in flight at once, at most."""
        return max(1, min(self.receiver.credit_bytes, self.receiver.total_bytes))

    @property
    def is_ack_due(self) -> bool:
        """Whether the sender may soon run out of credit, or has too little for a segment."""
        unacked_bytes = self.receiver.kv_bytes - self.acked_bytes
        return unacked_bytes >= min(self.wanted_bytes / 4, self.wanted_bytes - MAX_SEGMENT_BYTES)


def store(cache: KVCache, transfer: IncomingTransfer, segment: Segment) -> Exception | None:
    """Verify a segment and store it in its blocks, on any thread; return the error, if any."""
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
        # A new one: the transfer keeps it, and the frames of the first keep the memory mapped.
        return WireError(error.code, error.message)
    except Exception as problem:
        return problem
    return None


def store_all(
    cache: KVCache, batch: list[tuple[IncomingTransfer, Segment]]
) -> list[Exception | None]:
    """Store segments in order; return the error of each, or None."""
    return [store(cache, *arrived) for arrived in batch]
