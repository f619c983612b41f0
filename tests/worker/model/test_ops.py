"""Packed and plain parts of a layer give the same; torch's own is the measure."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu
from torch.nn.functional import rms_norm as torch_rms_norm

from worker.model.ops import Linear, packed, rms_norm, silu_gate

CPU = torch.device("cpu")


def filled(in_features: int, *, bias: bool, dtype: torch.dtype) -> Linear:
    matrix = Linear({"a": 20, "b": 12}, in_features, bias=bias, dtype=dtype, device=CPU)
    for tensor in matrix.named("").values():
        tensor.copy_(torch.randn(tensor.shape))
    return matrix


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [24, 6])  # 6 inputs have no packed form
def test_packing_changes_no_product(in_features: int, bias: bool, dtype: torch.dtype) -> None:
    matrix = filled(in_features, bias=bias, dtype=dtype)
    x, residual = torch.randn(7, in_features), torch.randn(7, 32)
    weight = matrix.weight.float()
    want = linear(x, weight, None if matrix.bias is None else matrix.bias.float())
    matrix.pack()
    torch.testing.assert_close(matrix(x), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        matrix.add_to(residual.clone(), x), residual + want, rtol=1e-5, atol=1e-5
    )


def test_a_plain_matrix_adds_without_changing_the_residual() -> None:
    matrix = filled(8, bias=True, dtype=torch.float32)
    x, residual = torch.randn(3, 8), torch.randn(3, 32)
    before = residual.clone()
    torch.testing.assert_close(matrix.add_to(residual, x), before + matrix(x))
    assert torch.equal(residual, before)


def test_a_shape_without_a_packed_form_is_none() -> None:
    assert packed(torch.zeros(16, 6, dtype=torch.float64)) is None
    assert packed(torch.zeros(16, 8)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_gate_are_torchs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 32).to(dtype), torch.randn(32).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), torch_rms_norm(x, (32,), weight, 1e-5))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_gate(x), silu(gate) * up)
