"""Memory that other processes on this machine can map read-only: a sealed Linux memfd.

The shared descriptor only allows reading, the size is fixed, and the kernel frees the memory after
its last user.  On other systems a cache stores its KV in private memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from wire.parts import Buffer
from wire.transfer import running_digest

Bytes = npt.NDArray[np.uint8]
# Copies each (source, target) pair and returns the seeded checksum; None if not supported.
CopyDigested = Callable[[Sequence[tuple[Bytes, Bytes]], int], int | None]

# From <linux/fcntl.h>: Python defines only some of these constants, and only on Linux.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL: Final = 0x1
_F_SEAL_SHRINK: Final = 0x2
_F_SEAL_GROW: Final = 0x4
_F_SEAL_FUTURE_WRITE: Final = 0x10
_SEALS: Final = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


class HostMemory:
    """Host memory as the array `bytes`, which is read-only if another process owns the memory."""

    kind: Final = "host"
    about: Final = b""

    def __init__(self, memory: Bytes, copy_digested: CopyDigested | None = None) -> None:
        self.bytes, self.address = memory, address_of(memory)
        self._copy_digested = copy_digested

    def __len__(self) -> int:
        return len(self.bytes)

    def chunks(self, places: Sequence[int], size: int) -> list[Bytes]:
        return [self.bytes[place : place + size] for place in places]

    def digest(self, places: Sequence[int], size: int, seed: int) -> int:
        """Return the seeded XXH3-64 checksum of the concatenated chunks at offsets `places`."""
        digest = running_digest(seed)
        for chunk in self.chunks(places, size):
            digest.update(chunk.data)
        return digest.intdigest()

    def copy(
        self,
        places: Sequence[int],
        size: int,
        target: HostMemory,
        targets: Sequence[int],
        seed: int,
    ) -> int:
        """Copy chunks; return the checksum of the copies, as the source may change meanwhile."""
        copies = target.chunks(targets, size)
        pairs = list(zip(self.chunks(places, size), copies, strict=True))
        if self._copy_digested is not None:
            found = self._copy_digested(pairs, seed)
            if found is not None:
                return found
        digest = running_digest(seed)
        for source, copy in pairs:
            copy[:] = source
            digest.update(copy.data)
        return digest.intdigest()

    def room(self, num_bytes: int) -> HostMemory:
        return HostMemory(np.empty(num_bytes, np.uint8))


class SharedMemory(HostMemory):
    """Zeroed memory of this process, which other processes can map read-only by `descriptor`.

    Raises:
        OSError: The system does not support it, or is out of memory.
    """

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes)
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)  # effective if shmem_enabled is `advise`
            super().__init__(np.frombuffer(mapping, np.uint8))
            # Seal after creating this mapping, which stays writable; later ones are read-only.
            _control(descriptor, _F_ADD_SEALS, _SEALS)
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


def zeros(
    *wanted: tuple[tuple[int, ...], Any],
) -> tuple[list[npt.NDArray[Any]], SharedMemory | None]:
    """Allocate zeroed arrays of these (shape, dtype) pairs, in shared memory if supported."""
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(it).itemsize for shape, it in wanted]
    # Align each array to a page, like a separate allocation.
    ends = list(accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes))
    try:
        if sys.platform != "linux" or not ends[-1]:
            raise OSError("there is no such memory")
        memory = SharedMemory(ends[-1])
    except OSError:
        return [np.zeros(shape, dtype) for shape, dtype in wanted], None
    parts = (
        memory.bytes[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)
    )
    return [
        part.view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, wanted, strict=True)
    ], memory


def address_of(memory: Buffer | Bytes) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def map_memory(descriptor: int) -> Bytes:
    """Map a `SharedMemory` of another process, which can write to the memory but not shrink it.

    Raises:
        OSError: The descriptor is no memfd, or the memory is not sealed against shrinking.
    """
    if not _control(descriptor, _F_GET_SEALS, 0) & _F_SEAL_SHRINK:
        raise PermissionError("the memory is not sealed against getting smaller")
    size = os.fstat(descriptor).st_size
    if not size:
        raise PermissionError("the memory is empty")
    mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, np.uint8)


def _control(descriptor: int, command: int, argument: int) -> int:
    import fcntl  # imported late: does not exist on every system

    return fcntl.fcntl(descriptor, command, argument)
