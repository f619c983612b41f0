"""Sealed segments: AES-256-GCM under a key that crossed CURVE.  SPEC 6.9.

Each transfer has its own key, sent in its offer.  The nonce is the request id and the number of the
segment, and a sender seals each number once.  The place of a segment is authenticated with it.
"""

from __future__ import annotations

import secrets
from typing import Final

from wire.frames import KvCache
from wire.parts import Buffer
from wire.transfer.segment import DESCRIPTOR, MAX_SEGMENT_BYTES, SegmentDescriptor

KEY_BYTES: Final = 32
# What a sealed segment is longer than its KV: the tag, behind it.
TAG_BYTES: Final = 16
MAX_SEALED_BYTES: Final = MAX_SEGMENT_BYTES + TAG_BYTES
_NONCE_BYTES: Final = 12
# All of the descriptor but idle_us, which is known only when the segment leaves, after sealing, and
# which nothing but figures depends on.
_BOUND_BYTES: Final = DESCRIPTOR.size - 8


def new_key() -> bytes:
    """Make the key of one transfer."""
    return secrets.token_bytes(KEY_BYTES)


class Sealing:
    """Seals and opens the segments of one transfer, on any thread."""

    def __init__(self, key: bytes) -> None:
        # Here: it takes 10 ms to load, which only clusters with keys need to spend.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)

    def seal(self, frame: KvCache, descriptor: SegmentDescriptor, kv: Buffer) -> bytes:
        """Return the KV of a segment as it travels.  Once for each number, whatever happens."""
        return self._cipher.encrypt(*_place(frame, descriptor, kv))

    def open(self, frame: KvCache, descriptor: SegmentDescriptor, sealed: Buffer) -> bytes | None:
        """Return the KV of a sealed segment; None if this is not what was sealed for its place."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(*_place(frame, descriptor, sealed))
        except InvalidTag:
            return None


def _place(
    frame: KvCache, descriptor: SegmentDescriptor, data: Buffer
) -> tuple[bytes, Buffer, bytes]:
    header = frame.header()
    return header[:_NONCE_BYTES], data, header + descriptor.pack()[:_BOUND_BYTES]
