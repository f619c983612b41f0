"""The matrices of a layer."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

Tensors = dict[str, torch.Tensor]


class Linear:
    """y = x W^T + b, whose rows may be several projections of the checkpoint, one after another."""

    __slots__ = ("bias", "parts", "weight")

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = sum(parts.values())
        self.parts = parts
        self.weight = torch.empty(rows, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, rows] for [T, in_features]."""
        return linear(x, self.weight, self.bias)

    def named(self, prefix: str) -> Tensors:
        """Return the checkpoint's names and the rows each fills."""
        tensors: Tensors = {}
        start = 0
        for part, rows in self.parts.items():
            tensors[f"{prefix}{part}.weight"] = self.weight[start : start + rows]
            if self.bias is not None:
                tensors[f"{prefix}{part}.bias"] = self.bias[start : start + rows]
            start += rows
        return tensors
