"""A lane made of the CPU: the kernel through the shim, all memory the host's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kernels import KernelError
from kernels.cuda import launch
from tests.kernels.shim.backend import Shim


class CpuLane:
    """A lane of the CPU that knows what was asked of it."""

    def __init__(
        self, *, dtype: torch.dtype = torch.bfloat16, num_pinned: int = 1000, obstacle: str = ""
    ) -> None:
        self.buffers: list[int] = []
        self.moved: list[int] = []
        self.is_working = False
        self._num_pinned = num_pinned
        self._obstacle = obstacle
        self._shim = Shim({"kv": launch.kv_kernels(dtype, dtype)})

    def require(self, pool: torch.Tensor) -> None:
        if self._obstacle:
            raise KernelError(self._obstacle)

    @contextmanager
    def working(self) -> Iterator[None]:
        assert not self.is_working
        self.is_working = True
        try:
            yield
        finally:
            self.is_working = False

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self._num_pinned -= 1
        if self._num_pinned < 0:
            raise RuntimeError("no memory can be pinned")
        return torch.zeros(shape, dtype=dtype)

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype)
        self.buffers.append(buffer.nbytes)
        return buffer

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
        assert self.is_working
        self.moved.append(segment.nbytes)
        self._shim.run(launch.move(pool, block_table, layers, tokens, segment, into_pool=into_pool))
