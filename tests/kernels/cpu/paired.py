"""What bfloat16 products are compared with: the order of a tile's sums, in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu import amx

Floats = npt.NDArray[np.float32]
# Where the processor has no tiles what needs them is left out, and says so.
WAYS = [False, True] if amx.available() else [False]


def tile_sums(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return start + x W^T of bfloat16 x [T, K] and W [N, K], K of whole steps, summed as tiles do.

    A product of two bfloat16 is exact in float32, so that each sum is rounded once as in the
    processor.
    """
    left, right = x.float().numpy()[:, None, :], weight.float().numpy()[None, :, :]
    total: Floats = start.numpy().copy()
    for step in range(0, x.shape[1], amx.STEP):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(step, step + amx.STEP, 2):
            even += left[..., k] * right[..., k]
            odd += left[..., k + 1] * right[..., k + 1]
        total += even + odd
    return torch.from_numpy(total)
