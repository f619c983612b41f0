"""The bytes of a segment connection: plain TCP, read and written with few copies.  SPEC 6.9.

    sender      GREETING, token                       once
    receiver    GREETING                              once: it has admitted the token
    sender      head, KV                              each segment

A head has a fixed length, and says how many bytes of KV follow: they can be read to where they are
wanted, and sent from where they lie.  It is the envelope of SPEC 2.2 with a KV_CACHE header and the
descriptor of the segment.
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
    """Make a secret that opens one connection."""
    return secrets.token_bytes(TOKEN_BYTES)


def segment_head(frame: KvCache, descriptor: SegmentDescriptor, num_bytes: int) -> bytes:
    """Return the bytes that precede the KV of a segment."""
    length = HEADER_BYTES + DESCRIPTOR.size + num_bytes
    return PREFIX.pack(Tag.KV_CACHE, length) + frame.header() + descriptor.pack()


def read_head(head: bytes) -> tuple[KvCache, bytes, int]:
    """Return the frame, the descriptor as it came, and how many bytes of KV follow.

    Raises:
        RemoteProtocolError: It is no segment, or a longer one than there are.
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
