"""Matrices in pairs: the order of each way, for every remainder."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.linear_bfloat16 import PairedWeight
from kernels.cpu.program import Program
from tests.kernels.cpu.paired import WAYS, holds_tiles, sums_of
from tests.kernels.cpu.weights import product


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
