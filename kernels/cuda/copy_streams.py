"""Streams for copies between a pool and the host, beside the stream that computes.

`Lane` is all that `kernels.cuda.staging` asks of a device; the tests have one made of the CPU.
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

# Copies that run at a time: while one crosses to the host the kernel of the next packs, and the
# threads of two more have bytes to digest.  Each holds a buffer on the device.
IN_FLIGHT = 3


class Lane(Protocol):
    """Runs copies, IN_FLIGHT at a time, beside computation.

    What is larger than `max_buffer_bytes` goes some layers at a time where it needs a buffer.
    """

    device: torch.device
    max_buffer_bytes: int

    def require(self, pool: torch.Tensor) -> None:
        """Raise KernelError unless `move` can serve such a pool."""

    def mark(self) -> None:
        """Have copies from now on wait for all steps that were started so far, and no later one.

        The thread that computes calls it after it has started all of a step, before other threads
        learn which blocks the step has filled or freed.
        """

    def working(self) -> AbstractContextManager[None]:
        """Start copies and kernels inside behind the last mark; wait for them at the end."""

    def upload(self, block_table: Sequence[int]) -> torch.Tensor:
        """Return a block table in memory of the device, for any copy."""

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device can address; RuntimeError if there is none."""

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device."""

    def tensor(self, memory: Any) -> torch.Tensor:
        """Return memory of the device that torch has not allocated, which the tensor keeps.

        Args:
            memory: Has a `__cuda_array_interface__`.
        """

    def start(self, launches: list[Launch]) -> None:
        """Start kernels."""


class SideStream:
    """The lane of a CUDA device: streams of high priority beside its default one, where steps run.

    A block may be freed while a kernel that was started before still writes to it, so a copy waits
    for the event of the last mark.  It does not wait for all of the default stream: the step under
    way touches none of its blocks, and may take long.
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
        # A new one each time: a copy on another thread may be about to wait for the one before.
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
                stream.synchronize()  # which raises what has failed on the device
            finally:
                self._idle.put(stream)

    def upload(self, block_table: Sequence[int]) -> torch.Tensor:
        # From pageable memory, so it is there on return, and any stream may read it.
        return torch.tensor(block_table, dtype=torch.int32, device=self.device)

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        # Torch keeps freed pinned memory for the next one; asking the driver takes milliseconds.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def tensor(self, memory: Any) -> torch.Tensor:
        return torch.as_tensor(memory, device=self.device)

    def start(self, launches: list[Launch]) -> None:
        cuda.start(self.device, launches)


def lane_of(device: torch.device) -> Lane | None:
    """Return the lane of a GPU; None where the host reads a pool as it lies."""
    return SideStream(device) if device.type == "cuda" else None
