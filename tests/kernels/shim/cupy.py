"""As much of CuPy as `kernels.cuda.backend` uses, on a CPU: g++ compiles what NVRTC would.

So the backend itself runs without a GPU, on tensors of the CPU; torch's answers about devices are
replaced, too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.cuda import backend
from tests.kernels.shim.backend import GPU, compile_kernels, why_not

# Of two devices: what fills them, and their current streams.
MULTIPROCESSORS = [12, 13]
STREAMS = [12345, 12346]


class Cupy:
    """The module; `launched` has the device, the stream and the kernel of each launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, str]] = []
        self.device = -1
        self.cuda = self.Stream = self

    @contextmanager
    def Device(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def from_external(self, stream: Any) -> int:
        handle: int = stream.__cuda_stream__()[1]
        return handle

    def RawModule(
        self, *, code: str, options: Sequence[str], name_expressions: Sequence[str]
    ) -> RawModule:
        assert "-std=c++17" in options
        return RawModule(self, code, name_expressions)


class RawModule:
    """A source, compiled for each kernel that is wanted of it."""

    def __init__(self, cupy: Cupy, code: str, names: Sequence[str]) -> None:
        self._cupy, self._code, self._names = cupy, code, names

    def get_function(self, name: str) -> Function:
        assert name in self._names
        return Function(self._cupy, name, compile_kernels("cupy", [name], self._code))


class Function:
    """A kernel.  It has run when the call returns, where a GPU's has only begun."""

    def __init__(self, cupy: Cupy, name: str, library: ctypes.CDLL) -> None:
        self._cupy, self._name, self._library = cupy, name, library
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(
        self,
        grid: tuple[int, int],
        block: tuple[int],
        args: tuple[npt.NDArray[np.void]],
        *,
        shared_mem: int,
        stream: int,
    ) -> None:
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        size, arguments = ctypes.c_size_t(shared_mem), ctypes.c_void_p(args[0].ctypes.data)
        self._library.run0(*grid, *block, size, 0, 0, 0, arguments)
        self._cupy.launched.append((self._cupy.device, stream, self._name))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cupy]:
    """Have `kernels.cuda.backend` run its kernels on the CPU."""
    if reason := why_not():
        pytest.skip(reason)
    made = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    streams = [SimpleNamespace(cuda_stream=handle) for handle in STREAMS]
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    devices = [
        SimpleNamespace(
            multi_processor_count=count, shared_memory_per_multiprocessor=GPU.shared_bytes
        )
        for count in MULTIPROCESSORS
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    caches = (backend._cupy, backend._function, backend.gpu, backend.multiprocessors)  # noqa: SLF001
    for each in caches:
        each.cache_clear()
    yield made
    for each in caches:
        each.cache_clear()
