"""Packed matrices against torch in float64: every remainder of rows, columns and dtypes."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.linear import PackedWeight
from kernels.cpu.program import Program

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def product(
    x: torch.Tensor,
    weight: PackedWeight,
    y: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, plus y, without the padding."""
    padded = torch.full((x.shape[0], weight.num_columns), torch.nan)
    if y is not None:
        padded[:, : y.shape[1]] = y
    if bias is not None:
        bias = torch.cat((bias, torch.zeros(weight.num_columns - len(bias))))
    Program([weight.times(x, padded, bias=bias, is_added=y is not None)]).run()
    return padded[:, : weight.shape[0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 4), (48, 64), (50, 576), (1, 8), (960, 100)])
def test_products_equal_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator)
    packed = PackedWeight(weight)
    for rows in (*range(15), 64):
        x = torch.randn(rows, shape[1], generator=generator)
        residual = torch.randn(rows, shape[0], generator=generator)
        want = (x.double() @ weight.double().T).float()
        for y in (None, residual):
            for added in (None, bias):
                got = product(x, packed, y, added)
                total = want + (0 if y is None else y) + (0 if added is None else added)
                torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    packed = PackedWeight(torch.randn(1200, 130).to(dtype))
    x, bias = torch.randn(20, 130), torch.randn(1200)
    together = product(x, packed, bias=bias)
    for rows in (1, 2, 3, 5, 6, 7, 8, 13):
        for begin in (0, 3, 20 - rows):
            alone = product(x[begin : begin + rows], packed, bias=bias)
            assert torch.equal(alone, together[begin:][:rows])


@pytest.mark.parametrize("weight", [torch.zeros(16, 0), torch.zeros(16, 8, dtype=torch.float64)])
def test_what_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    assert not PackedWeight.fits(weight)
    with pytest.raises(ValueError, match="no packed form"):
        PackedWeight(weight)
