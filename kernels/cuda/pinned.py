"""Upload and download a step's arrays through pinned memory, without blocking the host.

Torch allocates pinned memory, and reuses it only after the copies from or to it are complete.  So
each step has its own memory, and the host may plan the next step while this one is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.signedinteger[Any]]


def upload(tables: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Start one copy of tables of any shape and one dtype to a device; return them as tensors."""
    sizes = [table.size for table in tables]
    packed = _pinned(sum(sizes), getattr(torch, tables[0].dtype.name), device)
    np.concatenate([table.reshape(-1) for table in tables], out=packed.numpy())
    pieces = torch.split(packed.to(device, non_blocking=True), sizes)
    return [piece.view(table.shape) for piece, table in zip(pieces, tables, strict=True)]


def put(tables: Sequence[tuple[torch.Tensor, Ints]]) -> None:
    """Write tables to tensors of their shapes and dtype on one device, in one upload."""
    targets = [target for target, _ in tables]
    sources = upload([table for _, table in tables], targets[0].device)
    pairs = [*zip(targets, sources, strict=True)]
    # One kernel writes to all tensors that are contiguous.
    runs = [pair for pair in pairs if pair[0].is_contiguous()]
    torch._foreach_copy_([target for target, _ in runs], [source for _, source in runs])
    for target, source in pairs:
        if not target.is_contiguous():
            target.copy_(source)


class Download:
    """A row of integers that is being copied to the host."""

    def __init__(self, row: torch.Tensor) -> None:
        """Start the copy of a row, [R]."""
        self._row = _pinned(len(row), row.dtype, row.device)
        self._row.copy_(row, non_blocking=True)
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end.record(torch.cuda.current_stream(row.device))

    def read(self) -> list[int]:
        """Wait for the copy, but for nothing that was launched later, and return the integers.

        Raises:
            RuntimeError: The device has failed.
        """
        self._end.synchronize()
        return self._row.tolist()


def _pinned(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")
