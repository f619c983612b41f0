"""Chains of blocks for tests of tiers."""

from __future__ import annotations

from worker.engine.blocks import ROOT
from worker.tiers.keys import BlockKey, Chain, follow


def chain(*tokens: int, after: Chain = ROOT, block_size: int = 1) -> list[BlockKey]:
    """The keys of a chain of blocks, each of one token again and again."""
    keys = []
    for token in tokens:
        after = key = follow(after, token.to_bytes(4, "little") * block_size)
        keys.append(key)
    return keys
