"""Sums of int8 products are exact, by each way that the processor has."""

from __future__ import annotations

import pytest
import torch
from numba import njit

from kernels.cpu import simd_int8
from tests.kernels.cpu.int8 import panels_of


@pytest.mark.parametrize("way", simd_int8.ways())
def test_sums_are_exact(way: str) -> None:
    product = simd_int8.byte_product(3, way)

    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        product(*arguments)

    generator = torch.Generator().manual_seed(1)
    for depth in (64, 192):
        w = torch.randint(-127, 128, (16, depth), generator=generator).to(torch.int8)
        x = torch.randint(-128, 128, (3, depth), generator=generator).to(torch.int8)
        # Where sums of 16 bits would end, if they were of more than two products.
        w[0], w[1], x[0], x[1] = 127, -127, -128, 127
        x[1, ::2] = 0
        panels, want = panels_of(w), x.int() @ w.int().T
        for rows in (1, 2, 3, 9):
            y = torch.full((3, 20), 7, dtype=torch.int32)
            call(
                panels.data_ptr(), x.data_ptr(), depth, y.data_ptr(), 80, depth // 64, rows,
                panels.data_ptr(),
            )  # fmt: skip
            count = min(rows, 3)
            assert torch.equal(y[:count, :16], want[:count])
            assert (y[count:] == 7).all() and (y[:, 16:] == 7).all()
