"""Memory that other processes of this machine may map to read: a sealed memfd of Linux.

Its descriptor allows nothing but reading, its size never changes, and the last user frees it.  On
other systems a cache keeps its KV in private memory.
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
# Copies each source to its target and returns the seeded digest of the copies; None if it cannot.
CopyDigested = Callable[[Sequence[tuple[Bytes, Bytes]], int], int | None]

# From <linux/fcntl.h>; Python names only some of them, and none on other systems.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL: Final = 0x1
_F_SEAL_SHRINK: Final = 0x2
_F_SEAL_GROW: Final = 0x4
_F_SEAL_FUTURE_WRITE: Final = 0x10
_SEALS: Final = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


class HostMemory:
    """Host memory: `bytes` is all of it, writable if it is our own."""

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
        """Return the XXH3-64 of concatenated chunks."""
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
        """Copy chunks; the digest is that of the copies, as the source may change meanwhile."""
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
    """Zeroed memory of our own; `descriptor` opens it to read only.

    Raises:
        OSError: The system does not support it, or lacks memory.
    """

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes)
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)  # where shmem_enabled is `advise`
            super().__init__(np.frombuffer(mapping, np.uint8))
            # After our own mapping, which stays writable: later ones cannot be.
            _control(descriptor, _F_ADD_SEALS, _SEALS)
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


def zeros(
    *wanted: tuple[tuple[int, ...], Any],
) -> tuple[list[npt.NDArray[Any]], SharedMemory | None]:
    """Allocate zeroed arrays of these shapes and dtypes, in shared memory if there is any."""
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(it).itemsize for shape, it in wanted]
    # Each begins at a page, as a separate array would.
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
    """Map memory of another process, which may write to it but not shrink it.

    Raises:
        OSError: It is no such memory, or not sealed against shrinking.
    """
    if not _control(descriptor, _F_GET_SEALS, 0) & _F_SEAL_SHRINK:
        raise PermissionError("the memory is not sealed against getting smaller")
    size = os.fstat(descriptor).st_size
    if not size:
        raise PermissionError("the memory is empty")
    mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, np.uint8)


def _control(descriptor: int, command: int, argument: int) -> int:
    import fcntl  # not on every system

    return fcntl.fcntl(descriptor, command, argument)
