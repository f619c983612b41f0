"""KV transfer as two state machines without sockets, threads or clocks.  SPEC 6.

    KVSender     prefill worker: offer -> segments within the credit -> wait for the final ACK;
                 or an offer together with all the KV ("unasked") -> wait for the final ACK
    KVReceiver   decode worker: reserve blocks -> grant credit -> admit, store, acknowledge

A segment is a message with one rectangle of the KV cache (layers x heads x tokens of one layer
group).  Credit is the total number of KV bytes that the sender may have sent.

Every transfer ends as DONE, FAILED or CANCELLED.  The caller passes in all frames of the request
and the monotonic time, polls `expired`, and frees the blocks only when `is_over`.  A sender's
blocks must also wait until ZeroMQ has released its buffers, a receiver's until `num_unpacking` is
0.  Frames that arrive after the end are ignored.

If the peer violates the protocol, the transfer becomes FAILED and raises `RemoteProtocolError`:
respond with ERROR.  Each KV byte is admitted at most once, and only within offer and credit.

Other packages import from this package, never from its modules.
"""

from __future__ import annotations

from wire.transfer.connection import GREETING as GREETING
from wire.transfer.connection import HEAD_BYTES as HEAD_BYTES
from wire.transfer.connection import TOKEN_BYTES as TOKEN_BYTES
from wire.transfer.connection import new_token as new_token
from wire.transfer.connection import read_head as read_head
from wire.transfer.connection import segment_head as segment_head
from wire.transfer.lease import TransferState as TransferState
from wire.transfer.receiver import Ack as Ack
from wire.transfer.receiver import KVReceiver as KVReceiver
from wire.transfer.receiver import Segment as Segment
from wire.transfer.sealing import MAX_SEALED_BYTES as MAX_SEALED_BYTES
from wire.transfer.sealing import TAG_BYTES as TAG_BYTES
from wire.transfer.sealing import Cipher as Cipher
from wire.transfer.sealing import Sealing as Sealing
from wire.transfer.sealing import new_key as new_key
from wire.transfer.segment import MAX_READ_BYTES as MAX_READ_BYTES
from wire.transfer.segment import MAX_SEGMENT_BYTES as MAX_SEGMENT_BYTES
from wire.transfer.segment import Rectangle as Rectangle
from wire.transfer.segment import SegmentDescriptor as SegmentDescriptor
from wire.transfer.segment import pack_places as pack_places
from wire.transfer.segment import plan as plan
from wire.transfer.segment import running_digest as running_digest
from wire.transfer.segment import segment_digest as segment_digest
from wire.transfer.segment import unasked_segments as unasked_segments
from wire.transfer.sender import KVSender as KVSender
