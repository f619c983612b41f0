"""Copy chunks of one GPU's memory and compute their digest in one kernel: csrc/device_copies.cu.

The digest has 64 bits.  It is not XXH3, which must read bytes in order: each word is mixed with its
position, and the results are summed in any order.  It detects mistakes, not forgery.  See SPEC 6.8.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.cuda.copy_streams import Lane
from kernels.cuda.launch import Launch, struct

# The kernel copies this many bytes at a time: offsets and sizes are multiples of it.
UNIT_BYTES = 16
# Constants of csrc/device_copies.cu.
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
    """Return the digest of chunks of memory; if there is a `target`, also copy the chunks.

    Args:
        source: The address to which `places`, offsets in bytes, are relative.
        size: Bytes of each chunk.
        target: The address, in device or pinned memory, to which `targets` are relative; 0: no
            copy.

    Raises:
        ValueError: An offset or the size is not a multiple of 16 bytes.
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
            [
                Launch(
                    "device_copies", "copy_pieces", grid, _THREADS, shared, arguments, (lists, sums)
                )
            ]
        )
    return int(sums.sum()) & _BITS
