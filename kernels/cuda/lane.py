"""Where copies between a pool and the host run: a stream beside the one that computes.

`Lane` is all that `kernels.cuda.staging` asks of a device; the tests have one made of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from kernels.cuda import backend as cuda
from kernels.cuda import launch


class Lane(Protocol):
    """Where copies run: beside what computes, and in order among themselves."""

    def require(self, pool: torch.Tensor) -> None:
        """Raise KernelError unless `move` can serve such a pool."""

    def working(self) -> AbstractContextManager[None]:
        """Have what is asked inside run after all that computes so far; wait for it at the end."""

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device can address; RuntimeError if there is none."""

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device."""

    def move(
        self,
        pool: torch.Tensor,
        block_table: Sequence[int],
        layers: range,
        tokens: range,
        segment: torch.Tensor,
        *,
        into_pool: bool,
    ) -> None:
        """Start the kernel between a pool and a segment, pinned or on the device."""


class SideStream:
    """The lane of a CUDA device: a stream of high priority.

    It waits for the device's default stream, on which steps run: a block may have been given back
    while a kernel that was asked for before still writes to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing = torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def require(self, pool: torch.Tensor) -> None:
        cuda.require_device(self._device.index or 0)
        launch.check_pool(pool)

    @contextmanager
    def working(self) -> Iterator[None]:
        self._stream.wait_stream(self._computing)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        # Torch keeps freed pinned memory for the next one; asking the driver takes milliseconds.
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def move(
        self,
        pool: torch.Tensor,
        block_table: Sequence[int],
        layers: range,
        tokens: range,
        segment: torch.Tensor,
        *,
        into_pool: bool,
    ) -> None:
        cuda.start(
            pool.device,
            launch.move(pool, block_table, layers, tokens, segment, into_pool=into_pool),
        )
