"""Copy weights into huge pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

# Size of a huge page of Linux on x86-64 and most other processors.
PAGE_BYTES = 1 << 21


def in_large_pages(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of x, in huge pages as far as it fills them.

    Where the system has no huge pages, or does not permit them, it is an ordinary copy.
    """
    if x.nbytes < PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return x.clone(memory_format=torch.contiguous_format)
    # The bytes before the first huge page are never touched, so they take no memory.
    memory = mmap.mmap(-1, x.nbytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE_BYTES
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, x.nbytes)
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=skipped)
    return copy.view(x.shape).copy_(x)
