"""Matrices in pairs: the order of each way, for every remainder."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from kernels import GELU_TANH
from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.program import Program
from tests.kernels.cpu.paired import WAYS, holds_tiles, sums_of


def product(
    x: torch.Tensor,
    weight: PairedWeight,
    way: Way,
    y: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, plus y, without the padding."""
    inputs = PairedWeight.inputs(len(x), x.shape[1])
    inputs.copy_(x)
    padded = torch.full((len(x), weight.num_columns), torch.nan)
    if y is not None:
        padded[:, : y.shape[1]] = y
    if bias is not None:
        bias = torch.cat((bias, torch.zeros(weight.num_columns - len(bias))))
    times = weight.times(inputs, padded, bias=bias, is_added=y is not None, way=way)
    Program([times]).run()
    return padded[:, : weight.shape[0]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (50, 576), (1, 8), (960, 100), (70, 1100)])
def test_products_are_summed_in_the_order_of_their_way(shape: tuple[int, int], way: Way) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).bfloat16()
    bias = torch.randn(shape[0], generator=generator)
    packed = PairedWeight(weight)
    padded = torch.nn.functional.pad(weight, (0, -shape[1] % 32))
    for rows in (0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 81):
        x = torch.randn(rows, shape[1], generator=generator).bfloat16()
        residual = torch.randn(rows, shape[0], generator=generator)
        left = torch.nn.functional.pad(x, (0, -shape[1] % 32))
        for y in (None, residual):
            for added in (None, bias):
                start = torch.zeros_like(residual) if added is None else added.expand_as(residual)
                start = start if y is None else start + y
                got = product(x, packed, way, y, added)
                assert torch.equal(got, sums_of(way, left, padded, start))


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(way: Way) -> None:
    packed = PairedWeight(torch.randn(1200, 130))
    x, bias = torch.randn(70, 130), torch.randn(1200)
    together = product(x, packed, way, bias=bias)
    for rows in (1, 2, 5, 16, 17, 32, 40):
        for begin in (0, 3, 70 - rows):
            alone = product(x[begin : begin + rows], packed, way, bias=bias)
            assert torch.equal(alone, together[begin:][:rows])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_biased", [False, True])
def test_gate_and_up_in_one(is_biased: bool, way: Way) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * 80, 1100, generator=generator).bfloat16()
    bias = torch.randn(2 * 80, generator=generator) * 9 if is_biased else None
    packed = PairedWeight(weight, is_gated=True)
    for rows in (0, 1, 3, 16, 17, 32, 33, 48, 600):
        x = torch.randn(rows, 1100, generator=generator).bfloat16()
        inputs, out = PairedWeight.inputs(rows, 1100), PairedWeight.inputs(rows, 80)
        inputs.copy_(x)
        Program([packed.times_gated(inputs, out, bias=bias, way=way)]).run()
        gate, up = product(x, PairedWeight(weight), way, bias=bias).chunk(2, dim=1)
        torch.testing.assert_close(out.float(), silu(gate) * up, rtol=2**-7.9, atol=1e-6)
        gelus = PairedWeight.inputs(rows, 80)
        Program([packed.times_gated(inputs, gelus, bias=bias, way=way, activation=GELU_TANH)]).run()
        want = gelu(gate.double(), approximate="tanh") * up
        torch.testing.assert_close(gelus.double(), want, rtol=2**-7.9, atol=1e-6)
        for row in range(0, rows, 7):
            alone = PairedWeight.inputs(1, 80)
            gated = packed.times_gated(inputs[row : row + 1], alone, bias=bias, way=way)
            Program([gated]).run()
            assert torch.equal(alone[0], out[row])


def test_room_for_inputs_is_padded_with_zeros() -> None:
    inputs = PairedWeight.inputs(3, 40)
    assert inputs.shape == (3, 40) and inputs.stride(0) >= 64
    assert not torch.as_strided(inputs, (3, 64), (inputs.stride(0), 1)).any()


@pytest.mark.skipif(Way.TILES not in WAYS, reason="this processor has no AMX")
@pytest.mark.parametrize("rows", [0, 1, 32, 40])
def test_a_product_leaves_no_tiles_behind(rows: int) -> None:
    packed, y = PairedWeight(torch.randn(48, 64)), torch.empty(rows, 48)
    times = packed.times(PairedWeight.inputs(rows, 64), y, way=Way.TILES)
    Program([times]).run(num_threads=1)
    assert not holds_tiles()
