"""A paged KV cache in host memory, for executors without torch.

Its items are the keys or values of one token in one head of one layer, as raw bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wire.layout import KVLayout, StateGroup
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.contract import KVCache
from worker.compute.pool_shape import PoolShape
from worker.compute.shared_memory import Bytes, address_of, zeros
from worker.compute.state_slots import StateSlots
from worker.compute.window_blocks import WindowBlocks

Items = npt.NDArray[Any]


class HostKVCache(KVCache):
    """A paged KV cache in host memory.

    Attributes:
        items: [num_blocks, num_layers, k|v, kv_heads, block_size] items of layers without a sliding
            window, group after group.
        window_items: The same for sliding-window layers.
        memory: The shared memory of both arrays, if other processes can read it, else None.
        states: uint8 [num_states, num_layers, heads, head_bytes] recurrent states, by group.
    """

    copies_wait = False

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        num_states: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window_blocks = WindowBlocks(num_blocks, block_size, num_window_blocks)
        self._shapes = {it: PoolShape.of(layout, windowed=it) for it in (False, True)}
        (self.items, self.window_items), self.memory = zeros(
            self._sizes(num_blocks, windowed=False),
            self._sizes(self.window_blocks.num_blocks, windowed=True),
        )
        self.states: dict[int, Bytes] = {
            index: np.zeros((num_states, it.num_layers, it.num_heads, it.head_bytes), np.uint8)
            for index, it in enumerate(layout.groups)
            if isinstance(it, StateGroup)
        }
        self.state_slots = StateSlots(num_states, block_size)

    def _sizes(self, num_blocks: int, *, windowed: bool) -> tuple[tuple[int, ...], str]:
        """Return the shape and dtype of the items of `num_blocks` blocks."""
        shape = self._shapes[windowed]
        item_bytes = self.layout.kv_groups[0].head_bytes // 2
        # NumPy moves numbers two to three times faster than raw bytes of the same size.
        kind = "u" if item_bytes in (1, 2, 4, 8) else "V"
        sizes = num_blocks, shape.num_layers, 2, shape.num_kv_heads, self.block_size
        return sizes, f"{kind}{item_bytes}"

    def rows(self, block_table: Sequence[int] | npt.NDArray[Any], num_tokens: int) -> Bytes:
        """Return a copy of the KV of a sequence's first tokens, in layers without a window.

        Returns:
            [num_tokens, token_bytes]; a row is [layer][k|v][kv_head][head_dim].
        """
        num_blocks = -(-num_tokens // self.block_size)
        items = self.items[np.asarray(block_table[:num_blocks], np.intp)]
        rows = np.moveaxis(items, -1, 1).reshape(-1, *items.shape[1:-1])[:num_tokens]
        return (
            np.ascontiguousarray(rows).view(np.uint8).reshape(num_tokens, self.layout.token_bytes)
        )

    def write(self, slots: npt.NDArray[np.int32], rows: Bytes) -> None:
        """Store one row per slot: [T] slots, [T, token_bytes] rows as the method `rows` returns."""
        blocks, offsets = np.divmod(slots, self.block_size)
        items = np.ascontiguousarray(rows).view(self.items.dtype)
        self.items[blocks, ..., offsets] = items.reshape(len(slots), *self.items.shape[1:-1])

    def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
        """Return a view of a rectangle's bytes, or None if they are not contiguous."""
        blocks, layers, _ = self._place(block_table, rectangle)
        is_whole = len(rectangle.tokens) == self.block_size and len(blocks) == 1
        items = self._items_of(rectangle)
        if not is_whole or len(rectangle.heads) != items.shape[3]:
            return None
        return memoryview(items[blocks[0], layers].reshape(-1).view(np.uint8).data)

    def place(self, block_table: Sequence[int], rectangle: Rectangle) -> int | None:
        view = self.view(block_table, rectangle)
        if view is None or self.memory is None:
            return None
        return address_of(view) - self.memory.address

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        blocks, layers, heads = self._place(block_table, rectangle)
        if rectangle.group in self.states:
            slot = self.state_slots.find(block_table, rectangle.tokens.start)
            states = self.states[rectangle.group][slot, layers, heads]
            return memoryview(states.tobytes())
        items = self._items_of(rectangle)[blocks, layers, :, heads]
        # [block, layer, k|v, head, offset] to [layer, k|v, head, token]
        items = items.transpose(1, 2, 3, 0, 4).reshape(*_shape_of(rectangle)[:3], -1)
        skipped = rectangle.tokens.start % self.block_size
        packed = np.ascontiguousarray(items[..., skipped : skipped + len(rectangle.tokens)])
        return memoryview(packed.reshape(-1).view(np.uint8).data)

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        blocks, layers, heads = self._place(block_table, rectangle)
        if len(segment) != rectangle.num_bytes(self.layout):
            raise ValueError(f"{len(segment)} bytes of KV do not fill {rectangle}")
        if rectangle.group in self.states:
            slot = self.state_slots.take(block_table, rectangle.tokens.start)
            states = self.states[rectangle.group][slot, layers, heads]
            states[:] = np.frombuffer(segment, np.uint8).reshape(states.shape)
            return
        tokens = rectangle.tokens
        logical, offsets = np.divmod(np.arange(tokens.start, tokens.stop), self.block_size)
        items = np.frombuffer(segment, self.items.dtype).reshape(_shape_of(rectangle))
        target = self._items_of(rectangle)[:, layers, :, heads]
        # [layer, k|v, head, token] to [token, layer, k|v, head]: NumPy puts the dimension of two
        # index arrays that are not adjacent (blocks, offsets) first.
        target[blocks[logical - logical[0]], ..., offsets] = items.transpose(3, 0, 1, 2)

    def _items_of(self, rectangle: Rectangle) -> Items:
        is_windowed = rectangle.group in self._shapes[True].first_layers
        return self.window_items if is_windowed else self.items

    def _place(
        self, block_table: Sequence[int], rectangle: Rectangle
    ) -> tuple[npt.NDArray[np.intp], slice, slice]:
        """Return the blocks, layers and heads to index the items of a rectangle with.

        Raises:
            ValueError: The rectangle does not fit the layout or the block table, or its tokens are
                no longer in the sliding window.
        """
        index, layers, heads, tokens = rectangle
        group = self.layout.groups[index] if index < len(self.layout.groups) else None
        num_blocks = -(-tokens.stop // self.block_size)
        if (
            group is None
            or not 0 <= layers.start < layers.stop <= group.num_layers
            or not 0 <= heads.start < heads.stop <= group.num_heads
            or min(tokens.start, tokens.stop - 1) < 0
            or (len(tokens) == 0) != (index in self.states)
            or num_blocks > len(block_table)
        ):
            raise ValueError(f"{rectangle} is not within {len(block_table)} blocks")
        first = min(tokens.start // self.block_size, num_blocks - 1)
        if index not in self.states:
            shape = self._shapes[index in self._shapes[True].first_layers]
            layers = shape.layers(index, layers)
        blocks = np.array(block_table[first:num_blocks], np.intp)
        if blocks.min() < 0:
            raise ValueError(
                f"{rectangle}: some of these tokens have no KV in layers with a window"
            )
        return blocks, slice(layers.start, layers.stop), slice(heads.start, heads.stop)


def _shape_of(rectangle: Rectangle) -> tuple[int, int, int, int]:
    """Return the shape of a rectangle's items in a segment: (layers, k|v, heads, tokens)."""
    return len(rectangle.layers), 2, len(rectangle.heads), len(rectangle.tokens)
