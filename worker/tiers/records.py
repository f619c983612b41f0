"""Records of blocks on disk: a header with the block's tokens, and its KV, each with a tag.

A tag covers the data, its nonce and what it is bound to, so that a torn, damaged or foreign record
is not opened.  Without keys the tag is a checksum (XXH3-128).  With keys both parts are encrypted
with AES-256-GCM; the key is derived from the secret key of the worker.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from itertools import count
from struct import Struct
from typing import Final, Protocol

from xxhash import xxh3_128

from wire.parts import Buffer
from wire.transfer import TAG_BYTES, Cipher
from worker.tiers.keys import BlockKey, digest_of

NONCE_BYTES: Final = 12
# length u32, hash u64 and parent of `BlockKey`; the tokens follow.
_HEADER: Final = Struct("<IQ16s")
_RANDOM_BYTES: Final = 8


class Seal(Protocol):
    """Adds tags and checks them."""

    @abstractmethod
    def close(self, nonce: bytes, data: Buffer, bound: bytes) -> list[Buffer]:
        """Return the data with its tag, in parts; a nonce must be used only once."""

    @abstractmethod
    def open(self, nonce: bytes, closed: Buffer, bound: bytes) -> Buffer | None:
        """Return the data, or None if the tag does not fit."""


class Checksum(Seal):
    """Detects damage, but not intent."""

    def close(self, nonce: bytes, data: Buffer, bound: bytes) -> list[Buffer]:
        return [data, _checksum(nonce, data, bound)]

    def open(self, nonce: bytes, closed: Buffer, bound: bytes) -> Buffer | None:
        data, tag = memoryview(closed)[:-TAG_BYTES], memoryview(closed)[-TAG_BYTES:]
        return data if _checksum(nonce, data, bound) == tag else None


class Encryption(Seal):
    """AES-256-GCM with a key that is derived from `secret`, for this use only."""

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derivation = HKDF(SHA256(), 32, salt=None, info=b"baton: KV blocks on disk")
        self._cipher = Cipher(derivation.derive(secret))

    def close(self, nonce: bytes, data: Buffer, bound: bytes) -> list[Buffer]:
        return [self._cipher.encrypt(nonce, data, bound)]

    def open(self, nonce: bytes, closed: Buffer, bound: bytes) -> Buffer | None:
        return self._cipher.decrypt(nonce, closed, bound)


class RecordFormat:
    """Packs and opens the records of blocks with the same number of tokens and bytes of KV.

    `identity` names the model, its KV layout and the block size: records of others do not open.
    """

    def __init__(self, block_size: int, kv_bytes: int, identity: bytes, seal: Seal) -> None:
        self.header_bytes = NONCE_BYTES + _HEADER.size + 4 * block_size + TAG_BYTES
        self.kv_bytes = kv_bytes + TAG_BYTES
        self._identity, self._seal = identity, seal
        # A random part for this start and a counter: no nonce is ever used twice with a key.
        self._start, self._numbers = os.urandom(_RANDOM_BYTES), count(0, 2)

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.kv_bytes

    def new_nonce(self) -> bytes:
        """Return the nonce of a new record; the KV has the number that follows."""
        number = next(self._numbers)
        if number >> 32:  # all used up
            self._start, self._numbers = os.urandom(_RANDOM_BYTES), count(0, 2)
            number = next(self._numbers)
        return self._start + number.to_bytes(4, "little")

    def pack_header(self, nonce: bytes, key: BlockKey) -> bytes:
        header = _HEADER.pack(key.length, key.hash, key.parent) + key.tokens
        return b"".join([nonce, *self._seal.close(nonce, header, self._identity)])

    def open_header(self, packed: Buffer) -> tuple[bytes, BlockKey] | None:
        """Return the nonce of a record and its key; None if it is no record of ours."""
        nonce = bytes(packed[:NONCE_BYTES])
        header = self._seal.open(nonce, memoryview(packed)[NONCE_BYTES:], self._identity)
        if header is None:
            return None
        length, prefix_hash, parent = _HEADER.unpack_from(header)
        tokens = bytes(header[_HEADER.size :])
        return nonce, BlockKey(digest_of(parent, tokens), prefix_hash, length, parent, tokens)

    def pack_kv(self, nonce: bytes, key: BlockKey, kv: Buffer) -> list[Buffer]:
        return self._seal.close(_next(nonce), kv, self._identity + key.digest)

    def open_kv(self, nonce: bytes, key: BlockKey, packed: Buffer) -> Buffer | None:
        """Return the KV of this block, or None if the record has that of another or is damaged."""
        return self._seal.open(_next(nonce), packed, self._identity + key.digest)


def _next(nonce: bytes) -> bytes:
    number = int.from_bytes(nonce[_RANDOM_BYTES:], "little") | 1
    return nonce[:_RANDOM_BYTES] + number.to_bytes(4, "little")


def _checksum(nonce: bytes, data: Buffer, bound: bytes) -> bytes:
    checksum = xxh3_128(nonce + bound)
    checksum.update(data)
    return checksum.digest()
