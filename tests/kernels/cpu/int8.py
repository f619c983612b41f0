"""A NumPy model of int8 products, number by number."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from kernels.cpu.linear_int8 import Int8Weight


def panels_of(w: torch.Tensor) -> torch.Tensor:
    """Return int8 W [N, K], of whole panels and steps, as [N / 16, K / 64, 16, 16, 4]."""
    return w.view(-1, 16, w.shape[1] // 64, 16, 4).permute(0, 2, 3, 1, 4).contiguous()


def planes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the high planes, the low planes and the scales of rows."""
    rows = x.float().numpy()
    largest = np.abs(rows).max(1, initial=0)
    is_nothing = largest < np.float32(2.0**-100)
    some = np.where(is_nothing, np.float32(1), largest)
    inverse = np.where(is_nothing, np.float32(0), np.float32(16256) / some)
    scales = np.where(is_nothing, np.float32(0), some / np.float32(16256))
    whole = np.rint(rows * inverse[:, None]).astype(np.int32)
    high = (whole + 64) >> 7
    low = whole - 128 * high
    return torch.from_numpy(high), torch.from_numpy(low), torch.from_numpy(scales)


def product_of(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, before: torch.Tensor | None
) -> torch.Tensor:
    """Return (x W^T + bias) + before as products with int8 come to it, [T, N]."""
    packed = Int8Weight(w)
    padded = pad(w.float(), (0, 0, 0, packed.num_columns - len(w)))
    scales = padded.abs().amax(1) / 127
    rounded = (padded / scales.clamp(min=torch.finfo().tiny)[:, None]).round().long()
    high, low, x_scales = planes_of(x)
    sums = [(plane.long() @ rounded.T).float() for plane in (high, low)]
    y = (sums[0] * 128 + sums[1]) * (scales * x_scales[:, None])
    y = y[:, : len(w)]
    y = y if bias is None else y + bias
    return y if before is None else y + before
