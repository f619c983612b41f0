"""GPU memory that other processes can map through a file descriptor.

CUDA's virtual memory management exports a descriptor of an allocation made for that.  The memory is
freed when the last process that has mapped it, or has the descriptor open, unmaps or closes it or
ends.  So mapped memory stays readable even if the process that allocated it is killed.  (CUDA's IPC
handles are worse: the memory ends with its process, after which reads by others are undefined, and
any process that has a handle can open it.) Neither torch nor CuPy offers these calls, so ctypes
calls libcuda; cuda.h documents them.  This has never run on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kernels.cuda.copy_streams import Lane
from kernels.cuda.device_copies import copy_pieces

LIBRARY = "libcuda.so.1"
# From cuda.h.
_PINNED, _DESCRIPTOR, _DEVICE, _MINIMUM = 1, 1, 1, 0
_READ: Final = 1
_READ_WRITE: Final = 3


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("device", c_int),
        ("windows", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", c_int), ("device", c_int), ("flags", c_int))


class DeviceMemory:
    """Memory mapped at an `address` of a lane's device.

    Attributes:
        kind: "cuda"; only memory of one kind can be copied into another.
        about: Description of the memory for a process that maps its descriptor.
        descriptor: File descriptor of memory that this process has allocated; -1 for mapped memory.
    """

    kind: Final = "cuda"

    def __init__(self, lane: Lane, handle: int, num_bytes: int, flags: int) -> None:
        """Map the allocation of a handle, and release the handle.

        Raises:
            OSError: A call of libcuda failed; the message has its name and CUDA's description.
        """
        self._lane, self._num_bytes = lane, num_bytes
        self.about = f"{self.kind} {num_bytes}".encode()
        self.descriptor = -1
        address = c_uint64()
        call, device = _calls(lane), lane.device.index or 0
        with ExitStack() as undo:
            undo.callback(call, "cuMemRelease", c_uint64(handle))
            size, none = c_size_t(num_bytes), c_uint64(0)
            call("cuMemAddressReserve", byref(address), size, c_size_t(0), none, none)
            undo.callback(call, "cuMemAddressFree", address, size)
            call("cuMemMap", address, size, c_size_t(0), c_uint64(handle), none)
            undo.callback(call, "cuMemUnmap", address, size)
            reach = partial(call, "cuMemSetAccess", address, size)
            try:
                reach(byref(_Access(_DEVICE, device, flags)), c_size_t(1))
            except OSError:
                if flags == _READ_WRITE:
                    raise
                # A driver may not support read-only memory.
                reach(byref(_Access(_DEVICE, device, _READ_WRITE)), c_size_t(1))
            weakref.finalize(self, undo.pop_all().close).atexit = False
        self.address = address.value

    @classmethod
    def allocate(cls, lane: Lane, num_bytes: int) -> DeviceMemory:
        """Allocate memory, rounded up to CUDA's allocation granularity.

        Raises:
            OSError: There is not enough memory, or the driver does not support such memory.
        """
        call, device = _calls(lane), lane.device.index or 0
        properties = _Properties(_PINNED, _DESCRIPTOR, _DEVICE, device)
        granularity, handle, descriptor = c_size_t(), c_uint64(), c_int()
        call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), _MINIMUM)
        size = -(-num_bytes // granularity.value) * granularity.value
        call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
        memory = cls(lane, handle.value, size, _READ_WRITE)
        call("cuMemExportToShareableHandle", byref(descriptor), handle, _DESCRIPTOR, c_uint64(0))
        os.set_inheritable(descriptor.value, False)
        memory.descriptor = descriptor.value
        weakref.finalize(memory, os.close, descriptor.value).atexit = False
        return memory

    @classmethod
    def map(cls, lane: Lane, descriptor: int, about: bytes) -> DeviceMemory:
        """Map memory of another process for reading; the caller must still close the descriptor.

        Raises:
            OSError: `about` or the descriptor belongs to other memory, or this GPU cannot read it.
        """
        kind, _, size = about.decode("ascii", "replace").partition(" ")
        if kind != cls.kind or not (size.isdecimal() and 0 < int(size) < 1 << 63):
            raise ConnectionError(f"the memory is {about!r}, and not cuda with its size")
        handle = c_uint64()
        place = c_void_p(descriptor)
        _calls(lane)("cuMemImportFromShareableHandle", byref(handle), place, _DESCRIPTOR)
        return cls(lane, handle.value, int(size), _READ)

    def __len__(self) -> int:
        return self._num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the memory to torch, whose tensor then keeps this object alive."""
        shape, data = (self._num_bytes,), (self.address, False)
        return {"data": data, "shape": shape, "typestr": "|u1", "version": 3}

    def digest(self, places: Sequence[int], size: int, seed: int) -> int:
        """Wait for the last marked step, then return the digest of the `size`-byte chunks there."""
        return copy_pieces(self._lane, self.address, places, size, seed)

    def copy(
        self, places: Sequence[int], size: int, target: Any, targets: Sequence[int], seed: int
    ) -> int:
        """Copy chunks to other memory of this kind or a `Room`; return the digest of the copies."""
        memory = self._lane, self.address
        return copy_pieces(*memory, places, size, seed, target.address, targets)

    def room(self, num_bytes: int) -> Room:
        """Return a buffer in host memory for copies."""
        return Room(self._lane, num_bytes)


class Room:
    """A buffer in host memory, `bytes`, to which a lane's device can write."""

    def __init__(self, lane: Lane, num_bytes: int) -> None:
        pinned = lane.pinned(torch.Size((num_bytes,)), torch.uint8)
        self.address = pinned.data_ptr()
        self.bytes: npt.NDArray[np.uint8] = pinned.numpy()


def _calls(lane: Lane) -> Callable[..., None]:
    """Return a function that calls libcuda by name, in torch's context of a lane's device.

    Raises:
        OSError: The library is missing, or a call failed.
    """
    cuda, context, device = _library(), c_void_p(), lane.device.index or 0

    def call(name: str, *arguments: Any) -> None:
        if result := getattr(cuda, name)(*arguments):
            sentence = c_char_p()
            cuda.cuGetErrorString(result, byref(sentence))
            raise OSError(f"{name}: {(sentence.value or b'error').decode()} ({result})")

    def call_in_context(name: str, *arguments: Any) -> None:
        call("cuCtxSetCurrent", context)  # of the calling thread
        call(name, *arguments)

    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    return call_in_context


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY)
