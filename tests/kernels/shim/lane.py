"""A lane made of the CPU: the kernel through the shim, all memory the host's.

All that is asked of it runs as late as it may: what computes, when a copy waits for it; kernels and
copies, when somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, local
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kernels import KernelError
from kernels.cuda.launch import Launch
from tests.kernels.instances import kv_kernels
from tests.kernels.shim.backend import Shim

# The shim runs one kernel of a process at a time.
DEVICE = Lock()


class Stream(TorchFunctionMode):
    """Kernels and copies in the order in which they are asked for; `synchronize` runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and kwargs == {"non_blocking": True}:
            self.calls.append(lambda: func(*args))
            return args[0]
        return func(*args, **kwargs or {})

    def synchronize(self) -> None:
        for call in self.calls:
            call()


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
        self._thread = local()
        self._shim = Shim({"kv": kv_kernels(dtype, dtype), "device_copies": ["copy_pieces"]})

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
        self._thread.stream = stream = Stream()
        try:
            with stream:
                yield
        finally:
            stream.synchronize()
            with self._lock:
                self.num_working -= 1

    def upload(self, block_table: Sequence[int]) -> torch.Tensor:
        self.uploaded.append(tuple(block_table))
        return torch.tensor(block_table, dtype=torch.int32)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._num_pinned -= 1
        if self._num_pinned < 0:
            raise RuntimeError("no memory can be pinned")
        return torch.zeros(shape, dtype=dtype)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype)
        self.buffers.append(buffer.nbytes)
        return buffer

    def tensor(self, memory: Any) -> torch.Tensor:
        described = SimpleNamespace(__array_interface__=memory.__cuda_array_interface__)
        described.memory = memory  # NumPy keeps what it was made of, and torch that
        return torch.from_numpy(np.asarray(described))

    def start(self, launches: list[Launch]) -> None:
        assert self.num_working
        # Of a move: pool, segment, table.
        self.moved += [it.keep[1].nbytes for it in launches if it.source == "kv"]
        self._thread.stream.calls.append(lambda: self._run(launches))

    def _run(self, launches: list[Launch]) -> None:
        with DEVICE:
            self._shim.run(launches)
