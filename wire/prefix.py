"""Prefix hashes: a u64 that identifies a block of tokens and all before it.  SPEC 5.3.

Workers report the hashes of their cached blocks in HEARTBEAT.  The router hashes a prompt to find
which worker has how much of it cached.  Only full blocks have a hash.  Equal tokens with different
salts have different hashes.  Two prefixes may collide: the router then misroutes, and a worker must
compare the salts and the token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from struct import error as StructError

from xxhash import xxh3_64_intdigest


def root_hash(cache_salt: str) -> int:
    """Return the seed of a chain's first block: 0 without a salt, else 64 bits of BLAKE2b.

    With a digest that is not cryptographic, a client could find salts whose chains collide.
    """
    if not cache_salt:
        return 0
    return int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest(), "little")


def prefix_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[int]:
    """Return the hash of each full block: XXH3-64 of its token ids as little-endian u32.

    The seed is the hash of the previous block, for the first `root_hash(cache_salt)`.  Raises
    ValueError if `block_size` is less than 1 or a token id does not fit into a u32.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, not 1 or more")
    num_tokens = len(token_ids) // block_size * block_size
    try:
        packed = memoryview(Struct(f"<{num_tokens}I").pack(*token_ids[:num_tokens]))
    except StructError as no_u32:
        raise ValueError("a token id is no u32") from no_u32
    hashes: list[int] = []
    block_hash = root_hash(cache_salt)
    for start in range(0, 4 * num_tokens, 4 * block_size):
        block_hash = xxh3_64_intdigest(packed[start : start + 4 * block_size], seed=block_hash)
        hashes.append(block_hash)
    return hashes
