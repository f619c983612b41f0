"""The paged KV of a torch model: one pool tensor, and its bytes in and out for the wire.

Packing makes one copy (through the kernels, in the wire's order) and hands out its memory;
unpacking reads the received buffer in place.  Between a GPU and the host both go through
`kernels.cuda.staging`.  Nothing here knows which sequence owns which block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch

import kernels
from kernels.cuda.lane import IN_FLIGHT
from kernels.cuda.staging import Staging, Table, staging_of
from wire.layout import KVLayout
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.model.pool_shape import PoolShape

log = structlog.get_logger("worker")


class TorchKVCache:
    """Blocks of KV on one device: `pool` is [num_blocks, L, 2, Hkv, block_size, D].

    The executor has `spare_blocks` more for itself, behind those that the engine knows.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        spare_blocks: int = 0,
        make_staging: Callable[[torch.Tensor], Staging | None] = staging_of,
    ) -> None:
        self.layout = layout
        self._shape = shape = PoolShape.of(layout)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = torch.zeros(
            (
                num_blocks + spare_blocks,
                shape.num_layers,
                2,
                shape.num_kv_heads,
                block_size,
                shape.head_dim,
            ),
            dtype=getattr(torch, shape.dtype),
            device=device,
        )
        self._staging = make_staging(self.pool)
        # Copies by the host take cores from a step, so there is one at a time; those by a device
        # only have to be waited for.
        self.copies_at_once = 1 if self._staging is None else IN_FLIGHT
        if self._staging is not None:
            _tell(self._staging)

    def mark(self) -> None:
        """Have copies from now on wait for what was asked of the device so far: see `Staging`."""
        if self._staging is not None:
            self._staging.mark()

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        """Copy a rectangle of a sequence's KV out.

        Returns:
            Contiguous bytes in the wire's order [layer][k|v][kv_head][token][head_dim]; the view
            keeps its memory alive and nobody writes to it again.

        Raises:
            ShapeError: The rectangle lies outside the layers or the block table.
        """
        layers, heads, tokens = self._place(rectangle)
        if self._staging is None:
            segment = kernels.pack_kv(self.pool, block_table, layers, tokens, heads=heads)
        else:
            segment = self._staging.pack(block_table, layers, heads, tokens)
        # NumPy has no bfloat16, so the bytes leave as bytes.
        return segment.view(-1).view(torch.uint8).numpy().data

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        """Copy a segment in the wire's order into a sequence's blocks.

        Raises:
            ValueError: The segment's size does not fit the rectangle, or the rectangle the table.
        """
        layers, heads, tokens = self._place(rectangle)
        shape = (len(layers), 2, len(heads), len(tokens), self._shape.head_dim)
        received = _tensor_over(segment)
        size = torch.Size(shape).numel() * self.pool.itemsize
        if received.numel() != size:
            raise ValueError(f"the segment has {received.numel()} bytes, its rectangle {size}")
        values = received.view(self.pool.dtype).view(shape)
        if self._staging is None:
            kernels.unpack_kv(self.pool, block_table, layers, tokens, values, heads)
        else:
            self._staging.unpack(block_table, layers, heads, tokens, values)

    def _place(self, rectangle: Rectangle) -> tuple[range, range, range]:
        """Return layers, as they lie in the pool, heads and tokens."""
        group, layers, heads, tokens = rectangle
        return self._shape.layers(group, layers), heads, tokens


def _tell(staging: Staging) -> None:
    """Log how KV is copied to and from the host, by size, or why only the slow way is left."""
    if staging.why_plain:
        log.warning("KV goes through pageable memory", reason=staging.why_plain)
    else:
        out, back = _described(staging.packing), _described(staging.unpacking)
        log.info("KV goes to the host", out=out, back=back)


def _described(table: Table) -> str:
    return " ".join(f"{size >> 10}K:{way.value}" for size, way in table)


class _Memory:
    """A buffer described to torch as writable bytes.

    Torch warns about, or copies, what is read-only, as received bytes are; the tensor made of this
    is only ever read.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = np.frombuffer(buffer, np.uint8)
        address, _ = self.buffer.__array_interface__["data"]
        self.__array_interface__ = {
            "data": (address, False),
            "shape": self.buffer.shape,
            "typestr": "|u1",
            "version": 3,
        }


def _tensor_over(buffer: Buffer) -> torch.Tensor:
    """Return the buffer's bytes as a uint8 tensor without copying them; do not write to it."""
    if len(buffer) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Memory(buffer)))
