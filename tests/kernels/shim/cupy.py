"""As much of CuPy as `kernels.cuda.backend` uses, on a CPU: g++ compiles what NVRTC would.

So the backend itself runs without a GPU, on tensors of the CPU; torch's answers about devices are
replaced, too.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from kernels.cuda import backend
from tests.kernels.shim.backend import GPU, compile_kernels, why_not

# Of two devices: what fills them, their current streams, and their contexts.
MULTIPROCESSORS = [12, 13]
STREAMS = [12345, 12346]
CONTEXTS = [777, 778]


C = TypeVar("C", ctypes.c_void_p, ctypes.Structure)


class Cupy:
    """The module, and those of CUDA's interfaces that it has under other names.

    A kernel has run when the call returns, where a GPU's has only begun.

    Args:
        is_idle: Launches run nothing and nothing is compiled: what is left is what the host does.

    Attributes:
        calls: what was called, by name.
        launched: the device, the stream and the kernel of each launch.
    """

    def __init__(self, *, is_idle: bool = False) -> None:
        self.calls: list[str] = []
        self.launched: list[tuple[int, int, str]] = []
        self.cuda = self.driver = self.runtime = self
        self._is_idle = is_idle
        self._thread = threading.local()
        self._functions: list[Function] = []

    @contextmanager
    def Device(self, index: int) -> Iterator[None]:
        self.calls.append("Device")
        before = self._context
        self._context = CONTEXTS[index]
        yield
        self._context = before

    def free(self, pointer: int) -> None:
        assert pointer == 0

    def RawModule(
        self, *, code: str, options: Sequence[str], name_expressions: Sequence[str]
    ) -> RawModule:
        self.calls.append("RawModule")
        assert "-std=c++17" in options
        assert ("-arch=sm_90a" in options) == ("wgmma" in code and "attend_wide" in code)
        return RawModule(self, code, name_expressions)

    def load(self, name: str, code: str) -> Function:
        """Compile a kernel for the current device."""
        library = None if self._is_idle else compile_kernels("cupy", [name], code)
        made = Function(len(self._functions), name, CONTEXTS.index(self._context), library)
        self._functions.append(made)
        return made

    def ctxGetCurrent(self) -> int:
        self.calls.append("ctxGetCurrent")
        return self._context

    def ctxSetCurrent(self, context: int) -> None:
        self.calls.append("ctxSetCurrent")
        self._context = context

    def launchKernel(
        self,
        f: int,
        grid_dim_x: int,
        grid_dim_y: int,
        grid_dim_z: int,
        block_dim_x: int,
        block_dim_y: int,
        block_dim_z: int,
        shared_mem_bytes: int,
        stream: int,
        kernel_params: int,
        extra: int,
    ) -> None:
        if self._is_idle:
            return
        self.calls.append("launchKernel")
        it = self._functions[f]
        assert self._context == CONTEXTS[it.device], "the device of the kernel is not current"
        assert (grid_dim_z, block_dim_y, block_dim_z, extra) == (1, 1, 1, 0)
        assert shared_mem_bytes <= it.max_dynamic_shared_size_bytes
        # The driver copies the arguments during the call, so both must be alive until then.
        listed = held_at(kernel_params, ctypes.c_void_p)
        arguments = ctypes.byref(held_at(listed.value or 0, ctypes.Structure))
        shape = grid_dim_x, grid_dim_y, block_dim_x, ctypes.c_size_t(shared_mem_bytes)
        assert it.library is not None
        it.library.run0(*shape, 0, 0, 0, arguments)
        self.launched.append((it.device, stream, it.name))

    @property
    def _context(self) -> int:
        """The current context of this thread; a new thread has none."""
        context: int = getattr(self._thread, "context", 0)
        return context

    @_context.setter
    def _context(self, context: int) -> None:
        self._thread.context = context


class RawModule:
    """A source, compiled for each kernel that is wanted of it."""

    def __init__(self, cupy: Cupy, code: str, names: Sequence[str]) -> None:
        self._cupy, self._code, self._names = cupy, code, names

    def get_function(self, name: str) -> Function:
        assert name in self._names
        return self._cupy.load(name, self._code)


class Function:
    """A kernel of one device; `ptr` is its name for the driver."""

    def __init__(self, ptr: int, name: str, device: int, library: ctypes.CDLL | None) -> None:
        self.ptr, self.name, self.device, self.library = ptr, name, device, library
        self.kernel = self  # the kernel of CuPy that is compiled is another object
        self.max_dynamic_shared_size_bytes = 48 << 10


def held_at(address: int, kind: type[C]) -> C:
    """Return what of a kind of ctypes somebody holds at an address: it is no freed memory."""
    for generation in range(3):  # of the garbage collector, which knows them; most are young
        for it in gc.get_objects(generation):
            # By its type: a proxy of what is gone raises when it is asked.
            if issubclass(type(it), kind) and ctypes.addressof(it) == address:
                return cast(C, it)
    raise AssertionError(f"the driver is given the address of a {kind.__name__} that was freed")


@contextmanager
def standing_in(made: Cupy) -> Iterator[Cupy]:
    """Have `kernels.cuda.backend` run its kernels on the CPU."""
    devices = [
        SimpleNamespace(
            multi_processor_count=count, shared_memory_per_multiprocessor=GPU.shared_bytes
        )
        for count in MULTIPROCESSORS
    ]
    caches: tuple[Any, ...] = (
        backend._cupy,  # noqa: SLF001
        backend._context,  # noqa: SLF001
        backend._function,  # noqa: SLF001
        backend.gpu,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", made)
        current = STREAMS.__getitem__
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)  # noqa: SLF001
        patch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        for each in caches:
            each.cache_clear()
        yield made
    for each in caches:
        each.cache_clear()


@pytest.fixture
def cupy() -> Iterator[Cupy]:
    """Have `kernels.cuda.backend` run its kernels on the CPU."""
    if reason := why_not():
        pytest.skip(reason)
    with standing_in(Cupy()) as made:
        yield made
