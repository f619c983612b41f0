"""The parts of a layer are torch's; a matrix knows which rows a checkpoint fills."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu
from torch.nn.functional import rms_norm as torch_rms_norm

from worker.model.ops import Linear, rms_norm, silu_gate

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_projections_of_a_checkpoint_are_rows_of_one_matrix(bias: bool) -> None:
    matrix = Linear({"a": 20, "b": 12}, 24, bias=bias, dtype=torch.float32, device=CPU)
    parts = matrix.named("x.")
    for tensor in parts.values():
        tensor.copy_(torch.randn(tensor.shape))
    x = torch.randn(7, 24)
    want = [linear(x, parts[f"x.{name}.weight"], parts.get(f"x.{name}.bias")) for name in "ab"]
    torch.testing.assert_close(matrix(x), torch.cat(want, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_gate_are_torchs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 32).to(dtype), torch.randn(32).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch_rms_norm(x, (32,), weight, 1e-5))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_gate(x), silu(gate) * up)
