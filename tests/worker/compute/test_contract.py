"""A KV cache that only packs and unpacks inherits the rest: nobody reads it where it lies."""

from __future__ import annotations

from collections.abc import Sequence

from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.contract import KVCache
from worker.executor.hash import HashKVCache
from worker.transfer.in_memory import find


class Packed(KVCache):
    """Another cache, of which nothing is known but what it has to do."""

    def __init__(self, inner: HashKVCache) -> None:
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size
        self.layout, self._inner = inner.layout, inner
        self.state_slots, self.window_blocks = inner.state_slots, inner.window_blocks

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        return self._inner.pack(block_table, rectangle)

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        self._inner.unpack(block_table, rectangle, segment)


def test_a_cache_that_only_packs_is_a_cache() -> None:
    inner = HashKVCache(8, 4)
    group = inner.layout.kv_groups[0]
    block = Rectangle(0, range(group.num_layers), range(group.num_kv_heads), range(4))
    cache = Packed(inner)
    assert inner.view((5,), block) is not None and find(inner, (5,), block, 7) is not None
    assert cache.view((5,), block) is None and find(cache, (5,), block, 7) is None
    assert inner.place((5,), block) is not None and cache.place((5,), block) is None
    # It may wait for anything, so not even small copies run on the event loop.
    assert cache.copies_wait and not inner.copies_wait
    assert (cache.copies_at_once, cache.num_shards, cache.stages) == (1, 1, None)
