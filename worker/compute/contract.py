"""The interface of a KV cache, for the engine and transfers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from wire.layout import KVLayout
from wire.parts import Buffer
from wire.transfer import Rectangle
from worker.compute.shared_memory import Bytes, CopyDigested, HostMemory, map_memory
from worker.compute.state_slots import StateSlots
from worker.compute.window_blocks import WindowBlocks


class Memory(Protocol):
    """Memory of KV, of this process or mapped to read: `HostMemory` or `DeviceMemory`.

    Its `kind` is "host" or "cuda".  Each kind has a digest of its own (SPEC 6.8).
    """

    @property
    def kind(self) -> str: ...
    def __len__(self) -> int: ...
    def copy(
        self, places: Sequence[int], size: int, target: Any, targets: Sequence[int], seed: int
    ) -> int:
        """Copy chunks of `size` bytes from offsets `places` to offsets `targets` of `target`.

        Args:
            target: Memory of the same kind, or a result of `room`.

        Returns:
            The seeded digest of the concatenated copies.
        """

    def room(self, num_bytes: int) -> Room:
        """Allocate host memory that `copy` can write to."""


class Room(Protocol):
    """Host memory for copies."""

    bytes: Bytes


class LentMemory(Memory, Protocol):
    """Memory of this process that others may map, given its `descriptor` and `about`."""

    @property
    def address(self) -> int: ...
    @property
    def about(self) -> bytes: ...
    @property
    def descriptor(self) -> int: ...
    def digest(self, places: Sequence[int], size: int, seed: int) -> int:
        """Return the seeded digest of concatenated chunks of `size` bytes."""


class KVCache(Protocol):
    """The paged KV of one worker.  Caches inherit from this class and its defaults.

    Several threads call `pack` and `unpack` at the same time: transfer threads while steps run, and
    the engine's thread, which swaps between two steps.  So each call needs buffers of its own, and
    a lock around shared data.  Callers never access a block while another call or step writes it.

    For layers with a window, `pack` and `unpack` are given window blocks
    (`worker.compute.window_blocks`).  A state belongs to the block of the last token before it, and
    lies in a slot (`worker.compute.state_slots`); the engine may keep the state at the end of a
    full block for other sequences that share it.

    Attributes:
        state_slots: Used only if the layout has states.
        window_blocks: Used only if layers have windows.
        num_shards, stages: How heads and layers are distributed; see `wire.transfer.plan`.
        copies_at_once: The number of transfer threads.
        copies_wait: Whether a copy waits for a device or another process.  If not, small copies run
            on the event loop.
        memory: The memory of the blocks, if other processes can map it: a decode worker on the same
            machine copies from it.
        copy_digested: A faster copy out of mapped host memory than NumPy's, or None.
    """

    num_blocks: int
    block_size: int
    layout: KVLayout
    state_slots: StateSlots
    window_blocks: WindowBlocks
    num_shards: int = 1
    stages: Sequence[Sequence[range]] | None = None
    copies_at_once: int = 1
    copies_wait: bool = True
    memory: LentMemory | None = None
    copy_digested: CopyDigested | None = None

    @abstractmethod
    def pack(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview:
        """Copy a rectangle of a sequence's KV out.

        Returns:
            Contiguous bytes in the wire's order, [layer][k|v][kv_head][token][dim], or of a state
            [layer][head].  The view keeps its memory alive, which is not written to again.

        Raises:
            ValueError: There is no such state, or the rectangle lies outside the table.
        """

    @abstractmethod
    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        """Copy a segment in the wire's order into a sequence's blocks.

        Raises:
            ValueError: The segment does not fit the rectangle, or the rectangle the table.
        """

    def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
        """Return the bytes of `pack` in place; None if they are not contiguous in host memory.

        The caller keeps the blocks until the socket has sent them.
        """
        return None

    def place(self, block_table: Sequence[int], rectangle: Rectangle) -> int | None:
        """Return the offset in `memory` of the bytes of `pack`; None if they are not contiguous."""
        return None

    def map_memory(self, descriptor: int, about: bytes) -> Memory:
        """Map the `LentMemory` of another cache to read; the caller closes the descriptor.

        Raises:
            OSError: This process cannot read it.
        """
        if about:
            raise OSError("the KV lies on a GPU, and this worker computes on none")
        return HostMemory(map_memory(descriptor), self.copy_digested)
