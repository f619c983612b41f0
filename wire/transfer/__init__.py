"""The KV transfer as two state machines without sockets, threads or clocks.  SPEC 6.

    KVSender     prefill worker: offer -> segments within the credit -> wait for the final ACK;
                 or an offer that all the KV comes with -> wait for the final ACK
    KVReceiver   decode worker: reserve blocks -> grant credit -> admit, store, acknowledge

Both ends always reach an end: DONE, FAILED or CANCELLED.  Whoever owns one gives it every frame of
its request and the time in monotonic seconds, asks `expired` now and then, and frees blocks only
when `is_over`.  A sender's blocks also have to wait until ZeroMQ has let go of the buffers it sends
without a copy, a receiver's until `num_unpacking` is 0.  Frames that arrive after the end change
nothing.

When the peer breaks the protocol, `RemoteProtocolError` is raised and the transfer is FAILED:
answer with ERROR.  Bytes are admitted once, inside the transfer and within the credit, or not at
all.

This is the door of the wing: the rest of the product imports from here, never from a room.
"""

from __future__ import annotations

from wire.transfer.connection import (
    GREETING,
    HEAD_BYTES,
    TOKEN_BYTES,
    new_token,
    read_head,
    segment_head,
)
from wire.transfer.lease import TransferState
from wire.transfer.receiver import Ack, KVReceiver, Segment
from wire.transfer.sealing import MAX_SEALED_BYTES, TAG_BYTES, Sealing, new_key
from wire.transfer.segment import (
    MAX_READ_BYTES,
    MAX_SEGMENT_BYTES,
    Rectangle,
    SegmentDescriptor,
    pack_places,
    plan,
    running_digest,
    segment_digest,
    unasked_segments,
)
from wire.transfer.sender import KVSender

__all__ = [
    "GREETING",
    "HEAD_BYTES",
    "MAX_READ_BYTES",
    "MAX_SEALED_BYTES",
    "MAX_SEGMENT_BYTES",
    "TAG_BYTES",
    "TOKEN_BYTES",
    "Ack",
    "KVReceiver",
    "KVSender",
    "Rectangle",
    "Sealing",
    "Segment",
    "SegmentDescriptor",
    "TransferState",
    "new_key",
    "new_token",
    "pack_places",
    "plan",
    "read_head",
    "running_digest",
    "segment_digest",
    "segment_head",
    "unasked_segments",
]
