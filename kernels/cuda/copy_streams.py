"""CUDA streams for copies between a pool and the host, beside the stream that computes.

`Lane` is the interface to a device that `kernels.cuda.staging` needs; tests implement it on the
CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from kernels.cuda import backend as cuda
from kernels.cuda import launch
from kernels.cuda.launch import Launch

# Copies that run at a time: while one is transferred to the host, the kernel of the next packs, and
# the threads of two more compute digests.  Each needs a buffer on the device.
IN_FLIGHT = 3


class Lane(Protocol):
    """A device's streams for copies, which runs IN_FLIGHT copies at a time beside computation.

    A copy that needs a buffer larger than `max_buffer_bytes` is split into groups of layers.
    """

    device: torch.device
    max_buffer_bytes: int

    def require(self, pool: torch.Tensor) -> None:
        """Raise KernelError unless the kernel `move` supports this pool."""

    def mark(self) -> None:
        """Make copies from now on wait for all steps launched so far, and for no later one.

        The thread that computes calls this after it has launched all of a step, before other
        threads learn which blocks the step has filled or freed.
        """

    def working(self) -> AbstractContextManager[None]:
        """Return a context whose copies and kernels run after the last mark and end at its exit."""

    def upload(self, block_table: Sequence[int]) -> torch.Tensor:
        """Return a block table in device memory, for any copy."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device can address; raise RuntimeError if there is none."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in device memory."""

    def tensor(self, memory: Any) -> torch.Tensor:
        """Return a tensor of device memory that torch has not allocated, and keep the memory alive.

        Args:
            memory: An object with a `__cuda_array_interface__`.
        """

    def start(self, launches: list[Launch]) -> None:
        """Launch kernels."""


class SideStream:
    """The lane of a CUDA device: high-priority streams beside the default one, where steps run.

    A block may be freed while a kernel that was launched before still writes to it, so a copy waits
    for the event of the last mark.  It does not wait for the whole default stream: the running step
    touches none of the copy's blocks, and may take long.
    """

    max_buffer_bytes = 32 << 20

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._computing = torch.cuda.default_stream(device)
        self._idle: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._idle.put(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._computing)
        # A new event each time: a copy on another thread may be about to wait for the previous one.
        self._marked = event

    def require(self, pool: torch.Tensor) -> None:
        cuda.require_device(self.device.index or 0)
        launch.check_pool(pool)

    @contextmanager
    def working(self) -> Iterator[None]:
        stream = self._idle.get()
        try:
            stream.wait_event(self._marked)
            with torch.cuda.stream(stream):
                yield
        finally:
            try:
                stream.synchronize()  # raises the device's errors
            finally:
                self._idle.put(stream)

    def upload(self, block_table: Sequence[int]) -> torch.Tensor:
        # From pageable memory, so the copy is complete on return, and any stream may read it.
        return torch.tensor(block_table, dtype=torch.int32, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # Torch reuses freed pinned memory; allocating it from the driver takes milliseconds.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def tensor(self, memory: Any) -> torch.Tensor:
        return torch.as_tensor(memory, device=self.device)

    def start(self, launches: list[Launch]) -> None:
        cuda.start(self.device, launches)


def lane_of(device: torch.device) -> Lane | None:
    """Return the lane of a GPU; None for a device whose pools are in host memory."""
    return SideStream(device) if device.type == "cuda" else None
