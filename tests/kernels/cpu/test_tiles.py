"""Any number of rows, of panels and of steps at a time: the sums are those of one tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numba import njit

from kernels.cpu import amx
from kernels.cpu.tiles import num_together, rows_product
from tests.kernels.cpu.int8 import panels_of
from tests.kernels.cpu.paired import tile_sums

pytestmark = pytest.mark.skipif(not amx.available(), reason="this processor has no AMX")
STEPS = 5


@njit
def together(rows, panels):  # type: ignore[no-untyped-def]
    return num_together(rows, panels)


def call_of(product: Any) -> Any:
    @njit
    def call(layout, *arguments):  # type: ignore[no-untyped-def]
        amx.configure(layout)
        product(*arguments)
        amx.release()

    return call


CALLS = {of_bytes: call_of(rows_product(of_bytes=of_bytes)) for of_bytes in (False, True)}


@pytest.mark.parametrize("near", [2, STEPS])
@pytest.mark.parametrize("num_panels", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 16, 17, 31, 32, 64, 96, 160])
@pytest.mark.parametrize("of_bytes", [False, True])
@pytest.mark.parametrize("is_added", [0, 1])
def test_sums_are_those_of_one_tile(
    is_added: int, of_bytes: bool, rows: int, num_panels: int, near: int
) -> None:
    num_panels, columns = together(rows, num_panels), 16 * together(rows, num_panels)
    depth = STEPS * (amx.BYTES_STEP if of_bytes else amx.STEP)
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=generator)

    x, weight, before = numbers(rows, depth), numbers(columns, depth), numbers(rows, columns)
    if of_bytes:
        x, weight, y = x.to(torch.int8), weight.to(torch.int8), before.int()
        panels, want = panels_of(weight), is_added * before + x.long() @ weight.long().T
    else:
        x, weight, y = x.bfloat16() / 100, weight.bfloat16() / 100, before.float()
        panels = weight.view(-1, 16, STEPS, 16, 2).permute(0, 2, 3, 1, 4).contiguous()
        want = tile_sums(x, weight, is_added * y)
    layout = amx.configurations()[rows % 32]
    CALLS[of_bytes](
        layout.ctypes.data,
        num_panels, panels.data_ptr(), x.data_ptr(), x.stride(0) * x.itemsize, y.data_ptr(),
        4 * columns, rows, STEPS, near, is_added, panels.data_ptr(),
    )  # fmt: skip
    assert torch.equal(y, want.to(y.dtype))
