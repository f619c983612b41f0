"""Uploads and downloads of a step, through pinned memory: the host waits for neither.

Pinned memory is torch's to give: it gives a piece out again only when the copies from or to it have
ended.  So each step has pieces of its own, and the next one may be made while this one is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]


def upload(tables: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Return int32 tables in memory of the device, all in one copy that is only asked for."""
    sizes = [table.size for table in tables]
    packed = _pinned(sum(sizes), device)
    np.concatenate([table.reshape(-1) for table in tables], out=packed.numpy())
    pieces = torch.split(packed.to(device, non_blocking=True), sizes)
    return [piece.view(table.shape) for piece, table in zip(pieces, tables, strict=True)]


def put(tables: Sequence[tuple[torch.Tensor, Ints]]) -> None:
    """Write int32 tables to tensors of their shapes on one device, as `upload` does."""
    targets = [target for target, _ in tables]
    sources = upload([table for _, table in tables], targets[0].device)
    pairs = [*zip(targets, sources, strict=True)]
    # One kernel writes to all that lie in one run each.
    runs = [pair for pair in pairs if pair[0].is_contiguous()]
    torch._foreach_copy_([target for target, _ in runs], [source for _, source in runs])
    for target, source in pairs:
        if not target.is_contiguous():
            target.copy_(source)


class Download:
    """A row of int32 on its way to the host; `read` raises the errors of the device."""

    def __init__(self, row: torch.Tensor) -> None:
        """Ask for the copy."""
        self._row = _pinned(len(row), row.device)
        self._row.copy_(row, non_blocking=True)
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end.record(torch.cuda.current_stream(row.device))

    def read(self) -> list[int]:
        """Wait for the copy, and for nothing that was asked of the device later."""
        self._end.synchronize()
        return self._row.tolist()


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
