"""Matrices of 4-bit floats in blocks that share a scale (MXFP4), widened as they are loaded.

A block is 32 neighbours of a row, two in a byte, the low half first: a sign, two bits of exponent
and one of mantissa.  Its scale is a power of two, kept as the exponent of a float32 is.
"""

from __future__ import annotations

import math
from typing import Final

import torch

# The ends of names in the checkpoint; without them a name is that of the matrix.
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
BLOCK = 2 * BLOCK_BYTES
_SIZES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = (*_SIZES, *(-size for size in _SIZES))
_PAIRS = torch.tensor([(_VALUES[byte % 16], _VALUES[byte // 16]) for byte in range(256)])
# The format defines the last as NaN.
_POWERS = torch.tensor([*(2.0 ** (exponent - 127) for exponent in range(255)), math.nan])


def widen_into(
    target: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, *, skipped: int = 0
) -> None:
    """Fill the matrices of a target one after another, so that only one is float32 at a time.

    Args:
        target: [E, rows, columns] of any float dtype.
        blocks: [E, rows, groups, BLOCK_BYTES] uint8, enough for skipped + columns.
        scales: [E, rows, groups] uint8.
        skipped: How many columns lie before those of the target.

    Raises:
        ValueError: Blocks or scales are of another shape or dtype; says which.
    """
    num_matrices, rows, columns = target.shape
    end = skipped + columns
    shape = (num_matrices, rows, -(-end // BLOCK))
    for name, tensor, wanted in (
        (BLOCKS, blocks, (*shape, BLOCK_BYTES)),
        (SCALES, scales, shape),
    ):
        if tuple(tensor.shape) != wanted or tensor.dtype is not torch.uint8:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} are {found}, not torch.uint8 {list(wanted)}")
    for matrix, block, scale in zip(target, blocks, scales, strict=True):
        pairs = _PAIRS[block.int()].flatten(-2)
        matrix.copy_((pairs * _POWERS[scale.int()][..., None]).flatten(-2)[:, skipped:end])
