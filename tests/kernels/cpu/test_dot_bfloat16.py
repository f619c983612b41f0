"""The instruction does what its manual says, bit for bit; where the processor has it."""

from __future__ import annotations

import pytest
import torch
from numba import njit

from kernels.cpu import dot_bfloat16
from tests.kernels.cpu.paired import dot_sums

pytestmark = pytest.mark.skipif(
    not dot_bfloat16.available(), reason="this processor has no AVX512-BF16"
)
STEPS, MAX_ROWS = 3, 5
DEPTH = STEPS * 32


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, before: torch.Tensor, num_panels: int, is_added: bool
) -> torch.Tensor:
    """Return `before` with the sums of its first rows and `num_panels` panels."""
    product = dot_bfloat16.dot_product(MAX_ROWS, num_panels)

    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        product(*arguments)

    y = before.clone()
    panels = weight.view(-1, 16, STEPS, 16, 2).permute(0, 2, 3, 1, 4).contiguous()
    call(
        panels.data_ptr(), x.data_ptr(), 2 * DEPTH, y.data_ptr(), 4 * y.shape[1], STEPS, len(x),
        int(is_added), STEPS * 1024, panels.data_ptr(),
    )  # fmt: skip
    return y


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("num_panels", [1, 2, 4])
def test_products_are_summed_in_the_order_of_the_manual(
    num_panels: int, rows: int, is_added: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    columns, count = 16 * num_panels, min(rows, MAX_ROWS)
    x = torch.randn(rows, DEPTH, generator=generator).bfloat16()
    weight = torch.randn(columns, DEPTH, generator=generator).bfloat16()
    before = torch.randn(rows, columns + 3, generator=generator)
    got = multiplied(x, weight, before, num_panels, is_added)
    start = before[:count, :columns] if is_added else torch.zeros(count, columns)
    assert torch.equal(got[:count, :columns], dot_sums(x[:count], weight, start))
    assert torch.equal(got[:, columns:], before[:, columns:])
    assert torch.equal(got[count:], before[count:])


@pytest.mark.parametrize(
    ("x", "w", "before", "want"),
    [
        (1.0, 2**-127, 0.0, 0.0),  # a weight below 2^-126
        (2**-127, 1.0, 0.5, 0.5),  # a number of x below it
        (1.0, 0.0, 2**-127, 0.0),  # a sum below it
        (2**-64, 2**-64, 0.0, 0.0),  # a product below it
        (1.5 * 2**-63, 2**-63, -(2**-126), 0.0),  # what is left of a sum
        (2**-63, 2**-63, 0.0, 2**-126),
    ],
)
def test_what_is_below_two_to_the_minus_126_is_zero(
    x: float, w: float, before: float, want: float
) -> None:
    row, weight = torch.zeros(1, DEPTH).bfloat16(), torch.zeros(16, DEPTH).bfloat16()
    row[0, 6], weight[:, 6] = x, w
    got = multiplied(row, weight, torch.full((1, 16), before), 1, True)
    assert torch.equal(got, torch.full((1, 16), want))
