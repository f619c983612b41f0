"""One KV cache for a model whose KV is divided among several processes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np

from wire.layout import KVLayout, StateGroup
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.contract import KVCache
from worker.compute.kv_cache import TorchKVCache
from worker.compute.shared_memory import Bytes
from worker.parallel.partition import Part


class Copying(Protocol):
    """Copies the KV that one process stores; layers and heads count over the whole model.

    `indexes` are the blocks of a sequence, or the slot of a recurrent state; `share` is the range
    of layers, heads and tokens to copy.
    """

    def pack(self, indexes: Sequence[int], share: Rectangle) -> memoryview: ...
    def unpack(self, indexes: Sequence[int], share: Rectangle, segment: Buffer) -> None: ...


class ShardedKVCache(KVCache):
    """The KV cache of a model that is divided among several processes.

    With `num_shards` and `stages`, `wire.transfer.plan` makes segments that lie within one part;
    received segments may span several parts.
    """

    def __init__(self, layout: KVLayout, own: TorchKVCache, parts: Sequence[tuple[Part, Copying]]):
        self.layout = layout
        self.num_blocks, self.block_size = own.num_blocks, own.block_size
        self.copies_at_once = own.copies_at_once
        # The same in every process.
        self.state_slots, self.window_blocks = own.state_slots, own.window_blocks
        self._parts = parts
        self.num_shards = max(
            len({part.heads[it] for part, _ in parts if it in part.heads})
            for it in range(len(layout.groups))
        )
        self.stages = [
            sorted(
                {part.layers[it] for part, _ in parts if it in part.layers}, key=attrgetter("start")
            )
            for it in range(len(layout.groups))
        ]

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        if self._is_state(rectangle):
            block_table = [self.state_slots.find(block_table, rectangle.tokens.start)]
        shares = self._shares(rectangle)
        if len(shares) == 1:
            ((copying, share),) = shares
            return copying.pack(block_table, share)
        segment = np.empty(rectangle.num_bytes(self.layout), np.uint8)
        for copying, share in shares:
            packed = np.frombuffer(copying.pack(block_table, share), np.uint8)
            self._at(segment, rectangle, share)[:] = packed.reshape(self._shape(share))
        return segment.data

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        received, size = np.frombuffer(segment, np.uint8), rectangle.num_bytes(self.layout)
        if len(received) != size:
            raise ValueError(f"the segment has {len(received)} bytes, its rectangle {size}")
        if self._is_state(rectangle):
            block_table = [self.state_slots.take(block_table, rectangle.tokens.start)]
        for part, copying in self._parts:
            share = part.share(rectangle)
            if share is not None:
                own = np.ascontiguousarray(self._at(received, rectangle, share))
                copying.unpack(block_table, share, own.reshape(-1).data)

    def _shares(self, rectangle: Rectangle) -> list[tuple[Copying, Rectangle]]:
        """Return shares that cover each head and layer of a rectangle once, with their parts."""
        found: dict[Rectangle, Copying] = {}
        for part, copying in self._parts:
            share = part.share(rectangle)
            if share is not None:  # with fewer heads than shards, several parts have it
                found.setdefault(share, copying)
        return [(copying, share) for share, copying in found.items()]

    def _is_state(self, rectangle: Rectangle) -> bool:
        return isinstance(self.layout.groups[rectangle.group], StateGroup)

    def _shape(self, rectangle: Rectangle) -> tuple[int, ...]:
        group, layers, heads, tokens = rectangle
        num_bytes = self.layout.groups[group].head_bytes
        if self._is_state(rectangle):
            return len(layers), 1, len(heads), 1, num_bytes
        # The keys and the values of a head have the same size in a pool.
        num_bytes //= 2
        return len(layers), 2, len(heads), len(tokens), num_bytes

    def _at(self, segment: Bytes, rectangle: Rectangle, share: Rectangle) -> Bytes:
        """Return the view of a share in the KV of the whole rectangle."""
        layers, heads = rectangle.layers.start, rectangle.heads.start
        return segment.reshape(self._shape(rectangle))[
            share.layers.start - layers : share.layers.stop - layers,
            :,
            share.heads.start - heads : share.heads.stop - heads,
        ]
