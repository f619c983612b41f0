"""Packed matrices against torch in float64, and what holds of every kind of weight."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from kernels import GELU_TANH, SILU
from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.linear import PackedWeight
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from tests.kernels.cpu.weights import KINDS, Weight, gated_room, inputs_of, product

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
                got = product(x, packed, None, y, added)
                total = want + (0 if y is None else y) + (0 if added is None else added)
                torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize(("kind", "way"), KINDS)
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(kind: type[Weight], way: Way | None) -> None:
    packed = kind(torch.randn(1200, 144))
    x, bias = torch.randn(70, 144), torch.randn(1200)
    together = product(x, packed, way, bias=bias)
    for rows in (1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 32, 40):
        for begin in (0, 3, 70 - rows):
            alone = product(x[begin : begin + rows], packed, way, bias=bias)
            assert torch.equal(alone, together[begin:][:rows])


@pytest.mark.parametrize(("kind", "way"), KINDS[1:])
@pytest.mark.parametrize("is_biased", [False, True])
def test_gate_and_up_in_one(
    is_biased: bool, kind: type[PairedWeight] | type[Int8Weight], way: Way
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * 80, 1104, generator=generator)
    bias = torch.randn(2 * 80, generator=generator) * 9 if is_biased else None
    packed, tolerance = kind(weight, is_gated=True), 2**-7.9 if kind is PairedWeight else 3e-4
    for rows in (0, 1, 3, 8, 9, 16, 17, 32, 33, 600):
        x = torch.randn(rows, 1104, generator=generator)
        inputs, out = inputs_of(kind, x), gated_room(kind, rows, 80)
        gate, up = product(x, kind(weight), way, bias=bias).chunk(2, dim=1)
        wide = gate.double()
        for activation, want in (
            (GELU_TANH, gelu(wide, approximate="tanh") * up),
            (SILU, silu(wide) * up),
        ):
            gated = packed.times_gated(inputs, out, bias=bias, way=way, activation=activation)
            Program([gated]).run()
            torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=1e-6)
        for row in range(0, rows, 7):
            alone, some = gated_room(kind, 1, 80), inputs_of(kind, x[row : row + 1])
            Program([packed.times_gated(some, alone, bias=bias, way=way)]).run()
            assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("weight", [torch.zeros(16, 0), torch.zeros(16, 8, dtype=torch.float64)])
def test_what_does_not_fit_is_refused(weight: torch.Tensor) -> None:
    assert not PackedWeight.fits(weight)
    with pytest.raises(ValueError, match="no packed form"):
        PackedWeight(weight)
