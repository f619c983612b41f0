"""What the engine and transfers ask of a KV cache."""

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
    """Memory that KV lies in, of this process or mapped to read: `HostMemory` or `DeviceMemory`.

    Attributes:
        kind: "host" or "cuda".  Each kind has a digest of its own (SPEC 6.8), and copies go to
            memory of the same kind only.
    """

    @property
    def kind(self) -> str: ...
    def __len__(self) -> int: ...
    def copy(
        self, places: Sequence[int], size: int, target: Any, targets: Sequence[int], seed: int
    ) -> int:
        """Copy pieces of `size` bytes from `places` to `targets`, both in bytes from the beginning.

        Args:
            target: Memory of the same kind, or a result of `room`.

        Returns:
            The digest of the copies, one after the other, seeded.
        """

    def room(self, num_bytes: int) -> Room:
        """Allocate memory of the host that `copy` can write to."""


class Room(Protocol):
    """Memory of the host that copies are written to."""

    bytes: Bytes


class LentMemory(Memory, Protocol):
    """Memory of this process that others may map.

    Attributes:
        address: Where it begins.
        descriptor: Opens it for another process.
        about: What else that process has to know to map it; b"" for nothing.
    """

    @property
    def address(self) -> int: ...
    @property
    def about(self) -> bytes: ...
    @property
    def descriptor(self) -> int: ...
    def digest(self, places: Sequence[int], size: int, seed: int) -> int:
        """Return the seeded digest of pieces of `size` bytes, one after the other."""


class KVCache(Protocol):
    """The paged KV of one worker.  Caches inherit from this class, and may leave out what has a
    default.

    `pack` and `unpack` are called from several threads, perhaps at the same moment: the transfer
    thread takes KV from and to other workers while steps run, and the engine's thread swaps KV out
    and in between two steps.  So each call needs buffers of its own, and a lock around what calls
    share.

    KV of layers with a window lies beside the blocks that it still reaches, in blocks of their own
    (`worker.compute.window_blocks`).  `pack` and `unpack` are given those for such layers.

    A state lies with the block of the last token before it, in a slot
    (`worker.compute.state_slots`).  When a sequence goes on behind a full block, the state that is
    there stays as long as the engine wants: others may share the block and go on from it.

    The callers keep apart who uses a block: what one call or step writes, no other reads or writes
    meanwhile.

    Attributes:
        state_slots: Where states lie; asked for only if the layout has states.
        window_blocks: Where KV of layers with a window lies; only if there are such layers.
        num_shards, stages: In which places heads and layers are, so that no segment comes from two:
            see `wire.transfer.plan`.
        copies_at_once: How many transfer threads there are.
        copies_wait: Whether a copy waits for a device or another process.  Where none does, small
            ones run on the event loop, however many threads there are.
        memory: What blocks lie in, if other processes can read it: a decode worker on the same
            machine copies them out itself.
        copy_digested: Copies out of mapped memory of the host faster than NumPy; None for none.
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
            [layer][head]; the view keeps its memory alive and nobody writes to it again.
        """

    @abstractmethod
    def unpack(self, block_table: Sequence[int], rectangle: Rectangle, segment: Buffer) -> None:
        """Copy a segment in the wire's order into a sequence's blocks.

        Raises:
            ValueError: The segment's size does not fit the rectangle.
        """

    def view(self, block_table: Sequence[int], rectangle: Rectangle) -> memoryview | None:
        """Return the bytes of `pack` where they lie; None if that is not one piece of host memory.

        The blocks are held until the socket has let go of them.
        """
        return None

    def place(self, block_table: Sequence[int], rectangle: Rectangle) -> int | None:
        """Return at which byte of `memory` those of `pack` begin; None if they are not together."""
        return None

    def map_memory(self, descriptor: int, about: bytes) -> Memory:
        """Map the `LentMemory` of another cache, to read.  The caller still closes the descriptor.

        Raises:
            OSError: This process cannot read it.
        """
        if about:
            raise OSError("the KV lies on a GPU, and this worker computes on none")
        return HostMemory(map_memory(descriptor), self.copy_digested)
