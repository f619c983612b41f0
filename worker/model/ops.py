"""The parts of a layer besides attention: compiled loops on the CPU, torch elsewhere.

Once packed for the CPU, every activation is float32 whatever the weights are kept in: processors
that multiply 16-bit numbers are few, and memory, which 16-bit weights halve, is what decoding
waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, silu
from torch.nn.functional import rms_norm as torch_rms_norm

if TYPE_CHECKING:
    from kernels.linear import PackedWeight

Tensors = dict[str, torch.Tensor]


class Linear:
    """y = x W^T + b, whose rows may be several projections of the checkpoint, one after another."""

    __slots__ = ("_packed", "bias", "parts", "weight")

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
        self._packed: PackedWeight | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, rows] for [T, in_features]."""
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        from kernels.linear import linear as packed_linear

        if self.bias is None:
            return packed_linear(x, self._packed)
        return packed_linear(x, self._packed, self.bias.repeat(x.shape[0], 1))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + y; the residual's memory may be reused."""
        if self._packed is None:
            return residual + linear(x, self.weight, self.bias)
        from kernels.linear import linear as packed_linear

        packed_linear(x, self._packed, residual)
        return residual if self.bias is None else residual.add_(self.bias)

    def pack(self) -> None:
        """Arrange the weights for the CPU's loops; `weight` is empty afterwards."""
        if self.bias is not None:
            self.bias = self.bias.float()
        self._packed = packed(self.weight)
        self.weight = self.weight.float() if self._packed is None else self.weight.new_empty(0)

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


def packed(weight: torch.Tensor) -> PackedWeight | None:
    """Return a weight in the CPU's order, or None for a shape that has none."""
    from kernels.linear import PackedWeight

    return PackedWeight(weight) if PackedWeight.fits(weight) else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return [T, K] normalized rows times weight."""
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return torch_rms_norm(x, (x.shape[-1],), weight, eps)
    from kernels import rowwise

    return rowwise.rms_norm(x, weight, eps)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for [T, 2 K]."""
    if gate_up.device.type != "cpu" or gate_up.dtype is not torch.float32:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
    from kernels import rowwise

    return rowwise.silu_gate(gate_up)
