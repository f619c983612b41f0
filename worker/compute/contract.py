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
    """KV memory of this process, or of another process and mapped read-only.

    Its `kind` is "host" or "cuda"; each kind has its own checksum algorithm (SPEC 6.8).
    """

    @property
    def kind(self) -> str: ...
    def __len__(self) -> int: ...
    def copy(
        self, places: Sequence[int], size: int, target: Any, targets: Sequence[int], seed: int
    ) -> int:
        """Copy chunks of `size` bytes into `target`.

        Args:
            places, targets: The offset of each chunk in this memory, and of its copy in `target`.
            target: Memory of the same kind, or a buffer allocated by `room`.

        Returns:
            The checksum of the concatenated copies, seeded with `seed`.
        """

    def room(self, num_bytes: int) -> Room:
        """Allocate a buffer in host memory that `copy` can write to."""


class Room(Protocol):
    """A buffer in host memory that receives copies."""

    bytes: Bytes


class LentMemory(Memory, Protocol):
    """Memory of this process that others can map, given a file `descriptor` and `about`.

    `about` describes GPU memory; it is empty for host memory.
    """

    @property
    def address(self) -> int: ...
    @property
    def about(self) -> bytes: ...
    @property
    def descriptor(self) -> int: ...
    def digest(self, places: Sequence[int], size: int, seed: int) -> int:
        """Return the seeded checksum of the `size`-byte chunks at the offsets `places`."""


class KVCache(Protocol):
    """The paged KV of one worker.  Implementations inherit the defaults of this class.

    Several threads call `pack` and `unpack` concurrently: transfer threads while steps run, and the
    engine's thread, which swaps sequences out and in between steps.  So each call needs its own
    buffers, and shared data needs a lock.  Callers never access a block while another call or a
    step writes it.

    For sliding-window layers, the block table contains window blocks
    (`worker.compute.window_blocks`).  A recurrent state is stored in a slot
    (`worker.compute.state_slots`) that is found by the block of the last token before the state.
    The engine may keep the state at the end of a full block for prefix-cache reuse.

    Attributes:
        state_slots: Used only if the layout has recurrent states.
        window_blocks: Used only if there are sliding-window layers.
        num_shards, stages: How heads and layers are distributed; see `wire.transfer.plan`.
        copies_at_once: The number of transfer threads.
        copies_wait: Whether a copy blocks on a device or another process.  If False, small copies
            run on the event loop.
        memory: The memory of the blocks if other processes can map it, so that a decode worker on
            the same machine can copy from it.
        copy_digested: A function that copies mapped host memory faster than NumPy, or None.
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
        """Copy a rectangle (layers, heads, tokens) of a sequence's KV to host memory.

        Returns:
            Contiguous bytes in wire order: [layer][k|v][kv_head][token][dim], or [layer][head] for
            a recurrent state.  The view owns its memory, which is never reused.

        Raises:
            ValueError: There is no such state, or the rectangle is outside the block table.
        """

    @abstractmethod
    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        """Copy a received segment, in wire order, into a sequence's blocks or state slot.

        Raises:
            ValueError: The segment has the wrong size, or the rectangle is outside the table.
        """

    def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
        """Return the result of `pack` without a copy; None if it isn't contiguous in host memory.

        The caller must not free the blocks until the socket has sent them.
        """
        return None

    def place(self, block_table: Sequence[int], rectangle: Rectangle) -> int | None:
        """Return the rectangle's offset in `memory`; None if its bytes are not contiguous."""
        return None

    def map_memory(self, descriptor: int, about: bytes) -> Memory:
        """Map the `LentMemory` of another process read-only; the caller closes the descriptor.

        Raises:
            OSError: This process cannot read the memory.
        """
        if about:
            raise OSError("the KV lies on a GPU, and this worker computes on none")
        return HostMemory(map_memory(descriptor), self.copy_digested)
