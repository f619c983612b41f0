"""Pieces of a GPU's memory, copied and digested by one kernel: csrc/pieces.cu.

The digest is of 64 bits and not XXH3, whose blocks wait for one another: each word is mixed with
its place, and what comes out is added up in whatever order.  It notices mistakes, no forger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.cuda.lane import Lane
from kernels.cuda.launch import Launch, struct

# What the kernel moves at a time: places and sizes are multiples of it.
UNIT_BYTES = 16
# As in the source.
_THREADS, _UNITS = 128, 8
_BITS = (1 << 64) - 1

PIECES = struct("source places target targets sums seed", "num_units num_parts")


def copy_pieces(
    lane: Lane,
    source: int,
    places: Sequence[int],
    size: int,
    seed: int,
    target: int = 0,
    targets: Sequence[int] = (),
) -> int:
    """Return the digest of pieces of `size` bytes, each at its place behind the address `source`.

    With an address `target` they are copied behind that to `targets`; it may be of pinned memory.

    Raises:
        ValueError: A place or the size is not a multiple of 16 bytes.
        RuntimeError: There is no pinned memory, or the device has failed.
    """
    for each in (size, *places, *targets):
        if each % UNIT_BYTES:
            raise ValueError(f"a size or place is {each}, not a multiple of {UNIT_BYTES} bytes")
    num_units = size // UNIT_BYTES
    num_parts = -(-num_units // (_THREADS * _UNITS))
    with lane.working():
        lists = lane.pinned(torch.Size((2, len(places))), torch.int64)
        lists.numpy()[: 2 if target else 1] = [places, targets] if target else [places]
        sums = lane.pinned(torch.Size((len(places) * num_parts,)), torch.int64)
        arguments = PIECES(
            source=source,
            places=lists[0].data_ptr(),
            target=target,
            targets=lists[1].data_ptr(),
            sums=sums.data_ptr(),
            seed=seed,
            num_units=num_units,
            num_parts=num_parts,
        )
        shared = _THREADS * np.dtype(np.uint64).itemsize
        grid = (len(sums), 1)
        lane.start(
            [Launch("pieces", "copy_pieces", grid, _THREADS, shared, arguments, (lists, sums))]
        )
    return int(sums.sum()) & _BITS
