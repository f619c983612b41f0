"""One pass gives what torch's several give."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from kernels import rowwise

ROWS = [0, 1, 3, 8, 70]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1, 7, 64, 576])
def test_norm(rows: int, size: int) -> None:
    x, weight = torch.randn(rows, size) * 3, torch.randn(size)
    want = rms_norm(x, (size,), weight, 1e-6)
    torch.testing.assert_close(rowwise.rms_norm(x, weight, 1e-6), want, rtol=1e-5, atol=1e-6)


def test_norm_of_a_zero_row_is_zero() -> None:
    assert not rowwise.rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-6).any()


@pytest.mark.parametrize("rows", ROWS)
def test_gate(rows: int) -> None:
    gate_up = torch.randn(rows, 2 * 100) * 5
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(rowwise.silu_gate(gate_up), silu(gate) * up, rtol=1e-5, atol=1e-6)


def test_gate_of_values_whose_exponential_overflows() -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4]])
    got = rowwise.silu_gate(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(got, gate.clamp(min=0), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [2, 24, 64])
def test_rotation_touches_its_heads_only(rows: int, head_dim: int) -> None:
    x, angles = torch.randn(rows, 5, head_dim), torch.randn(rows, head_dim // 2)
    before = x.clone()
    rowwise.rotate_(x[:, :3], angles.cos(), angles.sin())
    pairs = torch.complex(*before[:, :3].contiguous().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(x[:, :3], torch.cat((turned.real, turned.imag), -1))
    assert torch.equal(x[:, 3:], before[:, 3:])
