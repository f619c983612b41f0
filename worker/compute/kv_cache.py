"""The paged KV cache of a torch model: its pool tensors, and conversion from and to wire order.

On a CPU, a whole block is stored in wire order and is viewed without a copy.  Anything else is
copied once by the kernels; unpacking reads directly from the received buffer.  Copies between a
GPU and the host use `kernels.cuda.staging` on a separate CUDA stream (a `Lane`).  This module does
not track which sequence owns which block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import numpy as np
import structlog
import torch

import kernels
from kernels.contract import segment_shape
from kernels.cuda.copy_streams import IN_FLIGHT, Lane, lane_of
from kernels.cuda.device_memory import DeviceMemory
from kernels.cuda.staging import Staging, Table
from wire.layout import KVLayout, StateGroup
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.contract import KVCache, Memory
from worker.compute.pool_shape import PoolShape
from worker.compute.shared_memory import Bytes, CopyDigested, SharedMemory, zeros
from worker.compute.state_slots import StateSlots
from worker.compute.window_blocks import WindowBlocks

log = structlog.get_logger("worker")


class TorchKVCache(KVCache):
    """The paged KV of a model on one device.

    Attributes:
        pool: [num_blocks + spare_blocks, L, 2, Hkv, block_size, D] for layers that see every
            position.  The executor uses the spare blocks, which the engine does not allocate.
        window_pool: The same for sliding-window layers and `window_blocks`, or None.
        memory: The memory of both pools if other processes can map it, else None.
        states: [num_states, L, H, F] float32 recurrent states, F values per head, or None.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        num_states: int = 0,
        num_window_blocks: int = 0,
        spare_blocks: int = 0,
        make_lane: Callable[[torch.device], Lane | None] = lane_of,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state_slots = StateSlots(num_states, block_size)
        self.window_blocks = WindowBlocks(num_blocks, block_size, num_window_blocks)
        self._shapes = {it: PoolShape.of(layout, windowed=it) for it in (False, True)}

        self._lane = make_lane(device)
        self.window_pool: torch.Tensor | None
        (self.pool, self.window_pool), self.memory = _zeros(
            [
                (num_blocks + spare_blocks, self._shapes[False]),
                (self.window_blocks.num_blocks + spare_blocks, self._shapes[True]),
            ],
            block_size,
            device,
            self._lane,
        )
        is_copied = self._lane is None and self.memory is not None
        self.copy_digested = _compiled_copy() if is_copied else None
        if not layout.windows:
            self.window_pool = None
        # The pools that have layers, keyed by whether these have a sliding window.
        pools = {False: self.pool, True: self.window_pool}
        self._pools = {it: pool for it, pool in pools.items() if pool is not None and pool.shape[1]}
        group = next((it for it in layout.groups if isinstance(it, StateGroup)), None)
        self.states: torch.Tensor | None = None
        if group is not None:
            shape_of_state = group.num_layers, group.num_heads, group.head_bytes // 4
            self.states = torch.zeros(num_states, *shape_of_state, device=device)
        self.mark()
        # For each pool in host memory: uint8 [blocks, layers, bytes of one layer of one block].
        self._layers: dict[bool, Bytes] = {}
        self._stagings: dict[bool, Staging] = {}
        for windowed, pool in self._pools.items():
            if self._lane is None:
                self._layers[windowed] = pool.flatten(2).view(torch.uint8).numpy()
            else:
                self._stagings[windowed] = staging = Staging(pool, self._lane)
                _log_staging(staging)
                if staging.why_plain:
                    self.memory = None  # peers would need the copy kernels, which cannot run here
        # Copies on the CPU compete with steps for cores, so only one runs at a time.
        self.copies_wait = self._lane is not None
        self.copies_at_once = 1 if self._lane is None else IN_FLIGHT

    @property
    def pools(self) -> list[torch.Tensor]:
        return [*self._pools.values()]

    def mark(self) -> None:
        """Make later copies wait for the steps launched so far, but not for later ones."""
        if self._lane is not None:
            self._lane.mark()

    def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
        whole = self._host_bytes(block_table, rectangle)
        return None if whole is None else whole.reshape(-1).data

    def place(self, block_table: Sequence[int], rectangle: Rectangle) -> int | None:
        block = self._whole_block(block_table, rectangle)
        if self.memory is None or block is None:
            return None
        windowed, number, layers = block
        pool = self._pools[windowed]
        values = number * pool.stride(0) + layers.start * pool.stride(1)
        return pool.data_ptr() + values * pool.itemsize - self.memory.address

    def map_memory(self, descriptor: int, about: bytes) -> Memory:
        if not about or self._lane is None:
            return super().map_memory(descriptor, about)
        for staging in self._stagings.values():
            if staging.why_plain:  # the copy kernels cannot run on this GPU
                raise OSError(staging.why_plain)
        return DeviceMemory.map(self._lane, descriptor, about)

    def _host_bytes(self, block_table: Sequence[int], rectangle: Rectangle) -> Bytes | None:
        """Return the bytes of a rectangle that is one block in host memory, uncopied; else None."""
        block = self._whole_block(block_table, rectangle) if self._layers else None
        if block is None:
            return None
        windowed, number, layers = block
        return self._layers[windowed][number, layers.start : layers.stop]

    def _whole_block(
        self, block_table: Sequence[int], rectangle: Rectangle
    ) -> tuple[bool, int, range] | None:
        """Return (has a window, block, layers) if the rectangle is one block of some layers."""
        if self.is_state(rectangle):
            return None
        windowed, (layers, heads, tokens) = self._in_pool(rectangle)
        index, before = divmod(tokens.start, self.block_size)
        num_heads = self._shapes[windowed].num_kv_heads
        is_whole = (before, len(tokens), len(heads)) == (0, self.block_size, num_heads)
        if not is_whole or (block := block_table[index]) < 0:  # `worker.compute.window_blocks.NONE`
            return None
        return windowed, block, layers

    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        if self.is_state(rectangle):
            slot = self.state_slots.find(block_table, rectangle.tokens.start)
            return self.pack_state(slot, rectangle)
        windowed, part = self._in_pool(rectangle)
        if (staging := self._stagings.get(windowed)) is None:
            segment = kernels.pack_kv(self._pools[windowed], block_table, part)
        else:
            segment = staging.pack(block_table, part)
        # NumPy has no bfloat16, so convert to uint8 first.
        return segment.view(-1).view(torch.uint8).numpy().data

    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        if self.is_state(rectangle):
            size = rectangle.num_bytes(self.layout)
            if len(segment) != size:
                raise ValueError(f"the segment has {len(segment)} bytes, its rectangle {size}")
            slot = self.state_slots.take(block_table, rectangle.tokens.start)
            self.unpack_state(slot, rectangle, segment)
            return
        if (whole := self._host_bytes(block_table, rectangle)) is not None:
            whole[:] = np.frombuffer(segment, np.uint8).reshape(whole.shape)
            return
        windowed, part = self._in_pool(rectangle)
        pool = self._pools[windowed]
        shape = segment_shape(pool, part)
        received = tensor_over(segment)
        size = prod(shape) * pool.itemsize
        if received.numel() != size:
            raise ValueError(f"the segment has {received.numel()} bytes, its rectangle {size}")
        values = received.view(pool.dtype).view(shape)
        if (staging := self._stagings.get(windowed)) is None:
            kernels.unpack_kv(pool, block_table, part, values)
        else:
            staging.unpack(block_table, part, values)

    def is_state(self, rectangle: Rectangle) -> bool:
        return isinstance(self.layout.groups[rectangle.group], StateGroup)

    def _state(self, slot: int, rectangle: Rectangle) -> torch.Tensor:
        _, layers, heads, _ = rectangle
        assert self.states is not None
        return self.states[slot, layers.start : layers.stop, heads.start : heads.stop]

    def pack_state(self, slot: int, rectangle: Rectangle) -> memoryview:
        with self._after_mark():
            state = self._state(slot, rectangle).to("cpu", copy=True)
        return state.contiguous().view(-1).view(torch.uint8).numpy().data

    def unpack_state(self, slot: int, rectangle: Rectangle, segment: Buffer) -> None:
        # Copy before viewing as float32: a received segment may be unaligned.
        received = tensor_over(segment).clone().view(torch.float32)
        with self._after_mark():
            state = self._state(slot, rectangle)
            state.copy_(received.view(state.shape))

    def _after_mark(self) -> AbstractContextManager[None]:
        """Return a context whose GPU copies wait for the steps before the last `mark` only."""
        return nullcontext() if self._lane is None else self._lane.working()

    def _in_pool(self, rectangle: Rectangle) -> tuple[bool, kernels.Rectangle]:
        """Return whether the rectangle's layers have a window, and where it is in their pool."""
        group, layers, heads, tokens = rectangle
        windowed = group in self._shapes[True].first_layers
        of_pool = self._shapes[windowed].layers(group, layers)
        return windowed, kernels.Rectangle(of_pool, heads, tokens)


def _zeros(
    wanted: Sequence[tuple[int, PoolShape]],
    block_size: int,
    device: torch.device,
    lane: Lane | None,
) -> tuple[list[torch.Tensor], SharedMemory | DeviceMemory | None]:
    """Allocate a zeroed pool [N, L, 2, Hkv, B, D] for each of `wanted`: N and the shape of a block.

    Returns:
        The pools, and the memory that has them all if other processes can map it, else None.
    """
    sizes = [
        (
            (number, it.num_layers, 2, it.num_kv_heads, block_size, it.head_dim),
            getattr(torch, it.dtype),
        )
        for number, it in wanted
    ]
    memory: SharedMemory | DeviceMemory | None
    num_bytes = [prod(shape) * it.itemsize for shape, it in sizes]
    if lane is None:
        # NumPy has no bfloat16, so allocate uint8.
        arrays, memory = zeros(*(((size,), np.uint8) for size in num_bytes))
        parts = [torch.from_numpy(array) for array in arrays]
    else:
        whole, memory = _zeros_on_device(sum(num_bytes), device, lane)
        parts = [*torch.split(whole[: sum(num_bytes)], num_bytes)]
    return [
        part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, sizes, strict=True)
    ], memory


def _zeros_on_device(
    num_bytes: int, device: torch.device, lane: Lane
) -> tuple[torch.Tensor, DeviceMemory | None]:
    try:
        memory = DeviceMemory.allocate(lane, num_bytes)
    except OSError as error:
        log.info("KV of this GPU is not shared", reason=str(error))
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device), None
    return lane.tensor(memory).zero_(), memory


def _compiled_copy() -> CopyDigested:
    from kernels.cpu import copying  # imported late: only caches in host memory need Numba

    copying.prepare()
    return copying.copy


def _log_staging(staging: Staging) -> None:
    if staging.why_plain:
        log.warning("KV goes through pageable memory", reason=staging.why_plain)
    else:
        out, back = _described(staging.packing), _described(staging.unpacking)
        log.info("KV goes to the host", out=out, back=back)


def _described(table: Table) -> str:
    return " ".join(f"{size >> 10}K:{way.value}" for size, way in table)


class _Memory:
    """Wraps a read-only buffer and reports it as writable, to avoid torch's warning."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = np.frombuffer(buffer, np.uint8)
        address, _ = self.buffer.__array_interface__["data"]
        self.__array_interface__ = {
            "data": (address, False),
            "shape": self.buffer.shape,
            "typestr": "|u1",
            "version": 3,
        }


def tensor_over(buffer: Buffer) -> torch.Tensor:
    """Return a uint8 tensor that shares the buffer's memory; do not write to it."""
    if len(buffer) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Memory(buffer)))
