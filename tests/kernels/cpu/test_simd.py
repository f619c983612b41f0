"""The vector loops by themselves: every number of rows, strides, and 16-bit elements exactly."""

from __future__ import annotations

import math

import pytest
import torch
from numba import njit

from kernels.cpu import simd
from tests.kernels.cpu.paired import tile_sums

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = {name: code for code, name in enumerate(simd.ELEMENTS)}


@pytest.mark.parametrize("element", list(DTYPES))
def test_a_panel_product(element: str) -> None:
    product = simd.panel_product(3)

    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        product(*arguments)

    w = torch.randint(-8, 8, (10, 24)).to(DTYPES[element])  # small integers: every sum is exact
    x = torch.randint(-8, 8, (3, 10)).float()
    for rows in (1, 2, 3, 9):
        for is_added in (0, 1):
            y = torch.ones(4, 20)
            call(
                CODES[element],
                w.data_ptr(), w.stride(0) * w.itemsize, x.data_ptr(), 40, y.data_ptr(), 80, 10,
                rows, is_added, 0, 0, 0,
            )  # fmt: skip
            want = torch.ones(4, 20)
            count = min(rows, 3)
            want[:count, :16] = x[:count] @ w[:, :16].float() + is_added
            assert torch.equal(y, want)


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 65519.9, 65520.0, 3.4e38]


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_rounding_is_torchs(element: str) -> None:
    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        simd.narrow(*arguments)

    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (20_000,), generator=generator, dtype=torch.int64)
    # Halfway between two neighbours, even and odd ones.
    ties = torch.arange(1, 2000) * 0x8000 + 0x3F80_0000
    numbers = torch.cat((bits, ties)).to(torch.int32).view(torch.float32)
    x = torch.cat((numbers, torch.tensor(SPECIAL), numbers.clamp(-1, 1)))
    x = x[: len(x) // simd.WIDTH * simd.WIDTH]
    got, want = torch.empty(len(x), dtype=DTYPES[element]), x.to(DTYPES[element])
    call(CODES[element], x.data_ptr(), got.data_ptr(), len(x))
    if element == "bfloat16":
        # A processor that rounds by itself takes them for zero.
        is_tiny = x.abs() < 2**-126
        assert torch.all(is_tiny.logical_not() | (got == want) | (got == 0))
        got[is_tiny] = want[is_tiny] = 0
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(
        got.nan_to_num(7.0).view(torch.int16), want.nan_to_num(7.0).view(torch.int16)
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_product_of_pairs(rows: int, is_added: bool) -> None:
    product = simd.pair_product(3)

    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        product(*arguments)

    x, w = torch.randn(3, 96).bfloat16(), torch.randn(16, 96).bfloat16()
    panel = w.view(16, 3, 16, 2).permute(1, 2, 0, 3).contiguous()
    y = torch.randn(4, 20)
    want, count = y.clone(), min(rows, 3)
    start = y[:count, :16].clone() if is_added else torch.zeros(count, 16)
    want[:count, :16] = tile_sums(x[:count], w, start)
    call(panel.data_ptr(), x.data_ptr(), 192, y.data_ptr(), 80, 3, rows, int(is_added))
    assert torch.equal(y, want)


@pytest.mark.parametrize("element", list(DTYPES))
@pytest.mark.parametrize("prefetch", [False, True])
def test_several_panels_at_a_time(element: str, prefetch: bool) -> None:
    product = simd.panel_product(2, 3, prefetch=prefetch)

    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        product(*arguments)

    w = torch.randint(-8, 8, (4, 10, 16)).to(DTYPES[element])
    x = torch.randint(-8, 8, (2, 10)).float()
    for rows in (1, 2):
        y = torch.ones(3, 50)
        call(
            CODES[element],
            w.data_ptr(), 16 * w.itemsize, x.data_ptr(), 40, y.data_ptr(), 200, 10, rows, 0,
            160 * w.itemsize, w.data_ptr(), 8 * w.itemsize,
        )  # fmt: skip
        want = torch.ones(3, 50)
        want[:rows, :48] = torch.cat([x[:rows] @ panel.float() for panel in w[:3]], dim=1)
        assert torch.equal(y, want)


@pytest.mark.parametrize("element", list(DTYPES))
def test_dots_with_four_keys(element: str) -> None:
    dots = simd.key_dots(2)

    @njit
    def call(*arguments):  # type: ignore[no-untyped-def]
        dots(*arguments)

    w = torch.randint(-8, 8, (6, 24)).to(DTYPES[element])
    x = torch.randint(-8, 8, (3, 24)).float()
    keys = [5, 0, 3, 3]
    for rows in (1, 2, 5):
        y = torch.zeros(3, 6)
        addresses = [w[key].data_ptr() for key in keys]
        call(CODES[element], *addresses, x.data_ptr(), 96, y.data_ptr() + 4, 24, 24, rows)
        want = torch.zeros(3, 6)
        want[: min(rows, 2), 1:5] = (x @ w[keys].float().T)[: min(rows, 2)]
        assert torch.equal(y, want)
