"""Encrypt ("seal") segments with AES-256-GCM.  SPEC 6.9.

Each transfer has its own key, sent in its offer over a CURVE connection.  The nonce is the request
id and the segment number, so a sender must seal each number only once.  The segment's header and
descriptor are authenticated with the KV.
"""

from __future__ import annotations

import secrets
from typing import Final

from wire.frames import KvCache
from wire.parts import Buffer
from wire.transfer.segment import DESCRIPTOR, MAX_SEGMENT_BYTES, SegmentDescriptor

KEY_BYTES: Final = 32
# A sealed segment is longer than its KV by the authentication tag, which follows the KV.
TAG_BYTES: Final = 16
MAX_SEALED_BYTES: Final = MAX_SEGMENT_BYTES + TAG_BYTES
_NONCE_BYTES: Final = 12
# The authenticated part of the descriptor: all but idle_us, which is only known when the segment is
# sent, after sealing, and is only used for statistics.
_BOUND_BYTES: Final = DESCRIPTOR.size - 8


def new_key() -> bytes:
    """Return a random key for one transfer."""
    return secrets.token_bytes(KEY_BYTES)


class Cipher:
    """AES-256-GCM with one key.  Thread-safe."""

    def __init__(self, key: bytes) -> None:
        # Imported here because loading takes 10 ms, and only clusters with keys need it.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)

    def encrypt(self, nonce: bytes, data: Buffer, bound: bytes) -> bytes:
        """Encrypt `data` and authenticate it with `bound`; a nonce must be used only once."""
        return self._cipher.encrypt(nonce, data, bound)

    def decrypt(self, nonce: bytes, sealed: Buffer, bound: bytes) -> bytes | None:
        """Decrypt `sealed`; None if it was not encrypted with this key, nonce and `bound`."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(nonce, sealed, bound)
        except InvalidTag:
            return None


class Sealing:
    """Encrypts and decrypts the segments of one transfer.  Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(key)

    def seal(self, frame: KvCache, descriptor: SegmentDescriptor, kv: Buffer) -> bytes:
        """Encrypt the KV of a segment.  Must be called at most once per segment number."""
        return self._cipher.encrypt(*_place(frame, descriptor, kv))

    def open(self, frame: KvCache, descriptor: SegmentDescriptor, sealed: Buffer) -> bytes | None:
        """Decrypt a sealed segment; None if KV, header or descriptor are not those sealed."""
        return self._cipher.decrypt(*_place(frame, descriptor, sealed))


def _place(
    frame: KvCache, descriptor: SegmentDescriptor, data: Buffer
) -> tuple[bytes, Buffer, bytes]:
    header = frame.header()
    return header[:_NONCE_BYTES], data, header + descriptor.pack()[:_BOUND_BYTES]
