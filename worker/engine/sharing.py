"""Sequences that begin alike share blocks: what a sequence adds to the prefix cache, what it lacks.

A block is named by its place in the cache's trie (`worker.engine.blocks`), before it is there as
after.
"""

from __future__ import annotations

from worker.engine.blocks import BlockPool
from worker.engine.sequence import Sequence

# (serial number of the parent, tokens)
Place = tuple[int, bytes]


def register(sequence: Sequence, pool: BlockPool) -> None:
    """Put the blocks that became full of computed tokens into the prefix cache."""
    num_full = sequence.num_computed_tokens // pool.block_size
    if num_full == sequence.num_registered_blocks:
        return
    keys = sequence.keys(num_full, pool.block_size)
    blocks = sequence.block_table
    for index in range(sequence.num_registered_blocks, num_full):
        sequence.prefix = pool.register(sequence.prefix, keys[index], blocks[index])
    sequence.num_registered_blocks = num_full


def filled(sequence: Sequence, num_tokens: int, pool: BlockPool) -> list[Place]:
    """Return the first block that is full when `num_tokens` more are computed; empty for none."""
    index = sequence.num_registered_blocks
    is_full = sequence.num_computed_tokens + num_tokens >= (index + 1) * pool.block_size
    if not is_full or not pool.enable_prefix_cache:
        return []
    return [(sequence.prefix.serial, sequence.keys(index + 1, pool.block_size)[index])]


def missing(sequence: Sequence, pool: BlockPool) -> list[Place]:
    """Return the first full block that a waiting sequence would not find; empty for none."""
    keys = sequence.keys(sequence.max_cached_tokens // pool.block_size, pool.block_size)
    cached, prefix = pool.match_prefix(keys)
    return [(prefix.serial, key) for key in keys[len(cached) : len(cached) + 1]]
