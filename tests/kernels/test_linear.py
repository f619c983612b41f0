"""Packed matrices against torch in float64: every remainder of rows, columns and dtypes."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import PackedWeight, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 4), (48, 64), (50, 576), (1, 8), (960, 100)])
def test_products_equal_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    packed = PackedWeight(weight)
    for rows in (*range(15), 64):
        x = torch.randn(rows, shape[1], generator=generator)
        want = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(linear(x, packed), want, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)
        residual = torch.randn(rows, shape[0], generator=generator)
        want += residual
        got = linear(x, packed, residual)
        assert got is residual
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    packed = PackedWeight(torch.randn(64, 130).to(dtype))
    x = torch.randn(20, 130)
    together = linear(x, packed)
    for rows in (1, 2, 5, 6, 7, 13):
        for begin in (0, 3, 20 - rows):
            assert torch.equal(linear(x[begin : begin + rows], packed), together[begin:][:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_can_be_looked_up(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 12).to(dtype)
    indices = torch.tensor([0, 49, 16, 15, 16], dtype=torch.int32)
    assert torch.equal(PackedWeight(weight).rows(indices), weight[indices.long()])


def test_rows_of_x_may_lie_apart() -> None:
    weight, x = torch.randn(32, 20), torch.randn(7, 40)
    got = linear(x[:, 20:], PackedWeight(weight))
    torch.testing.assert_close(got, x[:, 20:] @ weight.T)


@pytest.mark.parametrize("weight", [torch.zeros(16, 0), torch.zeros(16, 8, dtype=torch.float64)])
def test_what_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    assert not PackedWeight.fits(weight)
    with pytest.raises(ValueError, match="no packed form"):
        PackedWeight(weight)
