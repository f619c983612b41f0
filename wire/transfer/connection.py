"""The wire format of a segment connection, a separate TCP connection for KV segments.  SPEC 6.9.

    sender      GREETING, token                       once
    receiver    GREETING                              once, after it accepted the token
    sender      head, KV                              for each segment

The head has a fixed length and contains the number of KV bytes that follow.  So the KV can be
received into its destination and sent from its source without further copies.  The head is the
envelope of SPEC 2.2, the KV_CACHE header and the segment descriptor.
"""

from __future__ import annotations

import secrets
from typing import Final

from wire.errors import RemoteProtocolError
from wire.frames import HEADER_BYTES, KvCache, Tag
from wire.stream import PREFIX
from wire.transfer.sealing import MAX_SEALED_BYTES
from wire.transfer.segment import DESCRIPTOR, SegmentDescriptor

GREETING: Final = b"BATONKV2"
TOKEN_BYTES: Final = 32
HEAD_BYTES: Final = PREFIX.size + HEADER_BYTES + DESCRIPTOR.size


def new_token() -> bytes:
    """Return a random secret that authorizes one segment connection."""
    return secrets.token_bytes(TOKEN_BYTES)


def segment_head(frame: KvCache, descriptor: SegmentDescriptor, num_bytes: int) -> bytes:
    """Encode the head that precedes the KV of a segment."""
    length = HEADER_BYTES + DESCRIPTOR.size + num_bytes
    return PREFIX.pack(Tag.KV_CACHE, length) + frame.header() + descriptor.pack()


def read_head(head: bytes) -> tuple[KvCache, bytes, int]:
    """Decode a head; return the frame, the encoded descriptor and the number of KV bytes.

    Raises:
        RemoteProtocolError: The head is not that of a segment, or the segment is too long.
    """
    tag, length = PREFIX.unpack_from(head)
    num_bytes = length - HEADER_BYTES - DESCRIPTOR.size
    if tag != Tag.KV_CACHE or not 0 < num_bytes <= MAX_SEALED_BYTES:
        raise RemoteProtocolError(f"tag {tag} of {length} bytes is no segment")
    header, descriptor = head[PREFIX.size :][:HEADER_BYTES], head[-DESCRIPTOR.size :]
    frame = KvCache.from_header(header)
    if not frame.segment:
        raise RemoteProtocolError("segment 0 belongs on the KV socket")
    return frame, descriptor, num_bytes
