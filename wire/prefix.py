"""Prefix hashes: one u64 names a block of tokens and everything before it.  SPEC 5.3.

Workers index their cached blocks by it and report it in HEARTBEAT; the router computes it for a
prompt and sees who holds how much of it.  Only full blocks have a hash.  Two texts may have the
same hash: a router then loses a cache hit, a worker must compare the token ids to be sure.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError

from xxhash import xxh3_64_intdigest


def prefix_hashes(token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return the hash of each full block: XXH3-64 of its u32 little-endian ids.

    Its seed is the hash of the block before, 0 for the first.  Raises ValueError: `block_size` is
    under 1, or a token id is no u32.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, not 1 or more")
    num_tokens = len(token_ids) // block_size * block_size
    try:
        packed = memoryview(Struct(f"<{num_tokens}I").pack(*token_ids[:num_tokens]))
    except StructError as no_u32:
        raise ValueError("a token id is no u32") from no_u32
    hashes: list[int] = []
    block_hash = 0
    for start in range(0, 4 * num_tokens, 4 * block_size):
        block_hash = xxh3_64_intdigest(packed[start : start + 4 * block_size], seed=block_hash)
        hashes.append(block_hash)
    return hashes
