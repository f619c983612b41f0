"""Dequantizes MXFP4 matrices while loading: 4-bit floats in blocks that share a scale.

A block is 32 adjacent values of a row, two per byte, low half first.  A value has a sign bit, two
exponent bits and one mantissa bit.  A scale is a power of two, stored as an exponent with bias 127.
"""

from __future__ import annotations

import math
from typing import Final

import torch

# The suffixes that the checkpoint appends to a matrix's name.
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
BLOCK = 2 * BLOCK_BYTES
_SIZES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = (*_SIZES, *(-size for size in _SIZES))
_PAIRS = torch.tensor([(_VALUES[byte % 16], _VALUES[byte // 16]) for byte in range(256)])
# The format defines the largest exponent as NaN.
_POWERS = torch.tensor([*(2.0 ** (exponent - 127) for exponent in range(255)), math.nan])


def widen_into(
    target: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, *, skipped: int = 0
) -> None:
    """Dequantize E matrices into `target`, one at a time to limit memory for float32 results.

    Args:
        target: [E, rows, columns] of any float dtype.
        blocks: [E, rows, groups, BLOCK_BYTES] uint8, enough for skipped + columns.
        scales: [E, rows, groups] uint8.
        skipped: The number of leading columns of `blocks` to leave out.

    Raises:
        ValueError: Blocks or scales have a wrong shape or dtype.
    """
    num_matrices, rows, columns = target.shape
    end = skipped + columns
    shape = (num_matrices, rows, -(-end // BLOCK))
    for name, tensor, wanted in ((BLOCKS, blocks, (*shape, BLOCK_BYTES)), (SCALES, scales, shape)):
        if tuple(tensor.shape) != wanted or tensor.dtype is not torch.uint8:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} are {found}, not torch.uint8 {list(wanted)}")
    for matrix, block, scale in zip(target, blocks, scales, strict=True):
        pairs = _PAIRS[block.int()].flatten(-2)
        matrix.copy_((pairs * _POWERS[scale.int()][..., None]).flatten(-2)[:, skipped:end])
