"""A lane made of the CPU: the kernel through the shim, all memory the host's.

What computes is a list of calls, which run as late as they may: when a copy waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kernels import KernelError
from kernels.cuda.launch import Launch
from tests.kernels.instances import kv_kernels
from tests.kernels.shim.backend import Shim

# The shim runs one kernel of a process at a time.
DEVICE = Lock()


class CpuLane:
    """A lane of the CPU that knows what was asked of it.

    Attributes:
        computing: what was asked of the stream that computes and has not run.
        uploaded: every block table that went to the device.
        on_working: called by each copy when it may begin.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.bfloat16,
        num_pinned: int = 1000,
        obstacle: str = "",
    ) -> None:
        self.device = torch.device("cpu")
        self.max_buffer_bytes = 32 << 20
        self.buffers: list[int] = []
        self.moved: list[int] = []
        self.uploaded: list[tuple[int, ...]] = []
        self.computing: list[Callable[[], object]] = []
        self.on_working: Callable[[], object] = lambda: None
        self.num_working = 0
        self._num_marked = 0
        self._num_pinned = num_pinned
        self._obstacle = obstacle
        self._lock = Lock()
        self._shim = Shim({"kv": kv_kernels(dtype, dtype), "pieces": ["copy_pieces"]})

    def compute(self, call: Callable[[], object]) -> None:
        """Ask for something on the stream that computes."""
        self.computing.append(call)

    def require(self, pool: torch.Tensor) -> None:
        if self._obstacle:
            raise KernelError(self._obstacle)

    def mark(self) -> None:
        self._num_marked = len(self.computing)

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._lock:
            for call in self.computing[: self._num_marked]:
                call()
            del self.computing[: self._num_marked]
            self._num_marked = 0
            self.num_working += 1
        self.on_working()
        try:
            yield
        finally:
            with self._lock:
                self.num_working -= 1

    def upload(self, block_table: Sequence[int]) -> torch.Tensor:
        self.uploaded.append(tuple(block_table))
        return torch.tensor(block_table, dtype=torch.int32)

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self._num_pinned -= 1
        if self._num_pinned < 0:
            raise RuntimeError("no memory can be pinned")
        return torch.zeros(shape, dtype=dtype)

    def buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype)
        self.buffers.append(buffer.nbytes)
        return buffer

    def tensor(self, memory: Any) -> torch.Tensor:
        described = SimpleNamespace(__array_interface__=memory.__cuda_array_interface__)
        described.memory = memory  # NumPy keeps what it was made of, and torch that
        return torch.from_numpy(np.asarray(described))

    def start(self, launches: list[Launch]) -> None:
        assert self.num_working
        with DEVICE:
            # Of a move: pool, segment, table.
            self.moved += [it.keep[1].nbytes for it in launches if it.source == "kv"]
            self._shim.run(launches)
