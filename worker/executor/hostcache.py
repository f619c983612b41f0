"""Paged KV in host memory, for executors that compute without torch.

An item is the `head_dim` values of one head, as bytes: nothing here computes with them, so one
class serves every dtype, and copies move whole items.  NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wire.parts import Buffer
from wire.payloads import KVLayout
from wire.transfer import Rectangle

Items = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class HostKVCache:
    """Blocks of KV; implements `worker.executor.contract.KVCache`.

    Attributes:
        items: [num_blocks, num_layers, k|v, kv_heads, block_size] items.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._row = (layout.num_layers, 2, layout.num_kv_heads)
        item_bytes = layout.token_bytes // (2 * layout.num_layers * layout.num_kv_heads)
        # NumPy moves numbers two to three times faster than raw bytes of the same size.
        kind = "u" if item_bytes in (1, 2, 4, 8) else "V"
        shape = (num_blocks, *self._row, block_size)
        self.items: Items = np.zeros(shape, f"{kind}{item_bytes}")

    def rows(self, block_table: Sequence[int] | npt.NDArray[Any], num_tokens: int) -> Bytes:
        """Copy the KV of a sequence's first tokens out, a row for each token.

        Returns:
            [num_tokens, token_bytes]; a row is [layer][k|v][kv_head][head_dim].
        """
        num_blocks = -(-num_tokens // self.block_size)
        items = self.items[np.asarray(block_table[:num_blocks], np.intp)]
        rows = np.moveaxis(items, -1, 1).reshape(-1, *self._row)[:num_tokens]
        return (
            np.ascontiguousarray(rows).view(np.uint8).reshape(num_tokens, self.layout.token_bytes)
        )

    def write(self, slots: npt.NDArray[np.int32], rows: Bytes) -> None:
        """Store a row for each slot: [T] `slots`, [T, token_bytes] `rows` as `rows` returns."""
        blocks, offsets = np.divmod(slots, self.block_size)
        items = np.ascontiguousarray(rows).view(self.items.dtype)
        self.items[blocks, ..., offsets] = items.reshape(len(slots), *self._row)

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        layer_start, num_layers, token_start, num_tokens = rectangle
        self._check(block_table, rectangle)
        first, end = token_start // self.block_size, _blocks_for(rectangle, self.block_size)
        blocks = np.array(block_table[first:end], np.intp)
        items = self.items[blocks, layer_start : layer_start + num_layers]
        # [block, layer, k|v, head, offset] to [layer, k|v, head, token]
        items = items.transpose(1, 2, 3, 0, 4).reshape(num_layers, *self._row[1:], -1)
        skipped = token_start - first * self.block_size
        packed = np.ascontiguousarray(items[..., skipped : skipped + num_tokens])
        return memoryview(packed.reshape(-1).view(np.uint8).data)

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        layer_start, num_layers, token_start, num_tokens = rectangle
        self._check(block_table, rectangle)
        if len(segment) != rectangle.num_bytes(self.layout):
            raise ValueError(f"{len(segment)} bytes of KV do not fill {rectangle}")
        first, end = token_start // self.block_size, _blocks_for(rectangle, self.block_size)
        logical, offsets = np.divmod(
            np.arange(token_start, token_start + num_tokens), self.block_size
        )
        blocks = np.array(block_table[first:end], np.intp)[logical - first]
        items = np.frombuffer(segment, self.items.dtype)
        items = items.reshape(num_layers, *self._row[1:], num_tokens).transpose(3, 0, 1, 2)
        self.items[blocks, layer_start : layer_start + num_layers, :, :, offsets] = items

    def _check(self, block_table: Sequence[int], rectangle: Rectangle) -> None:
        if (
            min(rectangle) < 0
            or min(rectangle.num_layers, rectangle.num_tokens) < 1
            or rectangle.layer_end > self.layout.num_layers
            or _blocks_for(rectangle, self.block_size) > len(block_table)
        ):
            raise ValueError(f"{rectangle} is not within {len(block_table)} blocks")


def _blocks_for(rectangle: Rectangle, block_size: int) -> int:
    return -(-rectangle.token_end // block_size)
