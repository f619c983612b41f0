"""KV that comes back or from elsewhere, on its way into blocks.

Of layers with a window only what the window reaches comes, which may begin inside a block.  What is
before it in that block is whatever a sequence left there; kernels read it, though no query sees it,
and what is not finite would spoil their sums.  So it is cleared.  The block is the sequence's own:
what it shares with others are whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from wire.layout import KVGroup
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.contract import KVCache
from worker.engine.windows import table_of


def unpack(
    cache: KVCache,
    block_table: Sequence[int],
    rectangle: Rectangle,
    kv: Buffer,
    num_tokens: int,
) -> None:
    """Put a part of what is sent of `num_tokens` into blocks.

    Raises:
        ValueError: The KV does not fill the rectangle.
    """
    block_table = table_of(cache, rectangle.group, block_table)
    cache.unpack(block_table, rectangle, kv)
    group, first = cache.layout.groups[rectangle.group], rectangle.tokens.start
    if not isinstance(group, KVGroup) or first != group.sent(0, num_tokens).start:
        return
    before = range(first // cache.block_size * cache.block_size, first)
    if before:
        gap = rectangle._replace(tokens=before)
        cache.unpack(block_table, gap, bytes(gap.num_bytes(cache.layout)))
