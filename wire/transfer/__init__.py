"""The KV transfer as two state machines without sockets, threads or clocks.  SPEC 6.

    KVSender     prefill worker: offer -> segments within the credit -> wait for the final ACK;
                 or an offer that all the KV comes with -> wait for the final ACK
    KVReceiver   decode worker: reserve blocks -> grant credit -> admit, store, acknowledge

Both always end: DONE, FAILED or CANCELLED.  The owner passes every frame of the request and the
monotonic time, polls `expired`, and frees blocks only when `is_over`; a sender's also after ZeroMQ
has released its buffers, a receiver's when `num_unpacking` is 0.  Frames after the end change
nothing.

A peer that breaks the protocol makes the transfer FAILED and raises `RemoteProtocolError`: answer
with ERROR.  Bytes are admitted once, inside the transfer and within the credit.

The rest of the product imports from this package, never from its modules.
"""

from __future__ import annotations

from wire.transfer.connection import (
    GREETING as GREETING,
)
from wire.transfer.connection import (
    HEAD_BYTES as HEAD_BYTES,
)
from wire.transfer.connection import (
    TOKEN_BYTES as TOKEN_BYTES,
)
from wire.transfer.connection import (
    new_token as new_token,
)
from wire.transfer.connection import (
    read_head as read_head,
)
from wire.transfer.connection import (
    segment_head as segment_head,
)
from wire.transfer.lease import TransferState as TransferState
from wire.transfer.receiver import Ack as Ack
from wire.transfer.receiver import KVReceiver as KVReceiver
from wire.transfer.receiver import Segment as Segment
from wire.transfer.sealing import MAX_SEALED_BYTES as MAX_SEALED_BYTES
from wire.transfer.sealing import TAG_BYTES as TAG_BYTES
from wire.transfer.sealing import Sealing as Sealing
from wire.transfer.sealing import new_key as new_key
from wire.transfer.segment import (
    MAX_READ_BYTES as MAX_READ_BYTES,
)
from wire.transfer.segment import (
    MAX_SEGMENT_BYTES as MAX_SEGMENT_BYTES,
)
from wire.transfer.segment import (
    Rectangle as Rectangle,
)
from wire.transfer.segment import (
    SegmentDescriptor as SegmentDescriptor,
)
from wire.transfer.segment import (
    pack_places as pack_places,
)
from wire.transfer.segment import (
    plan as plan,
)
from wire.transfer.segment import (
    running_digest as running_digest,
)
from wire.transfer.segment import (
    segment_digest as segment_digest,
)
from wire.transfer.segment import (
    unasked_segments as unasked_segments,
)
from wire.transfer.sender import KVSender as KVSender
