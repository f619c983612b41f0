"""The KV transfer as two state machines without sockets, threads or clocks.  SPEC 6.

    KVSender     prefill worker: offer -> segments within the credit -> wait for the final ACK
    KVReceiver   decode worker: reserve blocks -> grant credit -> admit, store, acknowledge

Both ends always reach an end: DONE, FAILED or CANCELLED.  Whoever owns one gives it every frame of
its request and the time in monotonic seconds, asks `expired` now and then, and frees blocks only
when `is_over`; the sender's also only when its zero-copy buffers are let go of, the receiver's
only when `num_unpacking` is 0.  Frames that arrive after the end change nothing.

A violation by the peer raises `RemoteProtocolError` and leaves the transfer FAILED: answer with
ERROR.  Bytes are admitted once, inside the transfer and within the credit, or not at all.

This module is the door; the ends are in `wire.sender` and `wire.receiver`, what they share in
`wire.lease`, the geometry in `wire.segment`.
"""

from __future__ import annotations

from wire.lease import TRANSITIONS, Transfer, TransferState
from wire.receiver import Ack, KVReceiver, Segment
from wire.segment import (
    DEFAULT_SEGMENT_BYTES,
    MAX_SEGMENT_BYTES,
    Rectangle,
    SegmentDescriptor,
    segment_digest,
)
from wire.sender import KVSender

__all__ = [
    "DEFAULT_SEGMENT_BYTES",
    "MAX_SEGMENT_BYTES",
    "TRANSITIONS",
    "Ack",
    "KVReceiver",
    "KVSender",
    "Rectangle",
    "Segment",
    "SegmentDescriptor",
    "Transfer",
    "TransferState",
    "segment_digest",
]
