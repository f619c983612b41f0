"""Names of blocks in tiers: a digest of a block's tokens, of all tokens before it, and of the salt.

A trie node has a serial number that no other process knows; a digest means the same after a
restart.  Tokens are compared all the same, so that a tier returns the KV of these tokens or none.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

DIGEST_BYTES: Final = 16


class Chain(Protocol):
    """A chain of `length` full blocks: its digest, and its hash for routers (`wire.prefix`)."""

    @property
    def digest(self) -> bytes: ...
    @property
    def hash(self) -> int: ...
    @property
    def length(self) -> int: ...


class BlockKey(NamedTuple):
    """The last block of a chain: `parent` is the digest of the chain before it.

    `tokens` are the block's token ids, u32 little-endian.
    """

    digest: bytes
    hash: int
    length: int
    parent: bytes
    tokens: bytes


def follow(chain: Chain, tokens: bytes) -> BlockKey:
    """Return the key of a block with these tokens that follows a chain."""
    prefix_hash = xxh3_64_intdigest(tokens, chain.hash)
    digest = digest_of(chain.digest, tokens)
    return BlockKey(digest, prefix_hash, chain.length + 1, chain.digest, tokens)


def root_digest(cache_salt: str) -> bytes:
    """Return the digest of the empty chain, so that no chain is shared under another salt."""
    if not cache_salt:
        return bytes(DIGEST_BYTES)
    # Apart from the digests of chains: a salt may have the bytes of a digest and tokens.
    return blake2b(cache_salt.encode(), digest_size=DIGEST_BYTES, person=b"cache_salt").digest()


def digest_of(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a chain that ends with these tokens."""
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
