"""Matrices in 8 bits: one result, bit for bit, by tiles, by vectors and in NumPy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from kernels.cpu.bfloat16_methods import Way, known_ways
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from kernels.cpu.rows_int8 import to_planes
from tests.kernels.cpu.int8 import product_of
from tests.kernels.cpu.paired import holds_tiles

# Dots are of bfloat16.
WAYS = [way for way in known_ways() if way is not Way.DOTS]


def planes(x: torch.Tensor) -> torch.Tensor:
    inputs = Int8Weight.inputs(len(x), x.shape[1])
    Program([to_planes(x, inputs)]).run()
    return inputs


def product(
    x: torch.Tensor,
    weight: Int8Weight,
    way: Way | None,
    y: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T + bias, plus y, without the padding."""
    padded = torch.full((len(x), weight.num_columns), torch.nan)
    if y is not None:
        padded[:, : y.shape[1]] = y
    if bias is not None:
        bias = torch.cat((bias, torch.zeros(weight.num_columns - len(bias))))
    times = weight.times(planes(x), padded, bias=bias, is_added=y is not None, way=way)
    Program([times]).run()
    return padded[:, : weight.shape[0]]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60)
@given(
    rows=st.integers(0, 81),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 110)),
    is_biased=st.booleans(),
    is_added=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_numpy(
    rows: int,
    shape: tuple[int, int],
    is_biased: bool,
    is_added: bool,
    seed: int,
    way: Way,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_columns, depth = shape[0], 16 * shape[1]
    weight = torch.randn(num_columns, depth, generator=generator)
    x = torch.randn(rows, depth, generator=generator)
    bias = torch.randn(num_columns, generator=generator) if is_biased else None
    before = torch.randn(rows, num_columns, generator=generator) if is_added else None
    got = product(x, Int8Weight(weight), way, before, bias)
    assert torch.equal(got, product_of(x, weight, bias, before))


def test_rounding_the_weights_is_all_that_is_lost() -> None:
    weight, x = torch.randn(160, 576), torch.randn(20, 576)
    step = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / step).round() * step
    got = product(x, Int8Weight(weight), None)
    torch.testing.assert_close(got, x @ rounded.T, rtol=1e-3, atol=1e-2)
    assert (got - x @ weight.T).square().mean().sqrt() < 0.01 * got.square().mean().sqrt()


def test_a_column_of_zeros_is_zero() -> None:
    weight = torch.randn(16, 64)
    weight[3] = 0
    assert not product(torch.randn(5, 64), Int8Weight(weight), None)[:, 3].any()


@pytest.mark.parametrize("way", WAYS)
def test_the_largest_sums_are_within_32_bits(way: Way) -> None:
    depth = 133_136  # the last multiple of a panel below what is allowed
    x = torch.ones(1, depth)
    got = product(x, Int8Weight(torch.ones(16, depth)), way)
    torch.testing.assert_close(got, torch.full((1, 16), float(depth)))


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(way: Way) -> None:
    packed = Int8Weight(torch.randn(1200, 144))
    x, bias = torch.randn(70, 144), torch.randn(1200)
    together = product(x, packed, way, bias=bias)
    for rows in (1, 2, 5, 8, 9, 16, 17, 32, 40):
        for begin in (0, 3, 70 - rows):
            alone = product(x[begin : begin + rows], packed, way, bias=bias)
            assert torch.equal(alone, together[begin:][:rows])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_biased", [False, True])
def test_gate_and_up_in_one(is_biased: bool, way: Way) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * 80, 1104, generator=generator)
    bias = torch.randn(2 * 80, generator=generator) * 9 if is_biased else None
    packed = Int8Weight(weight, is_gated=True)
    for rows in (0, 1, 3, 8, 9, 16, 17, 48, 600):
        x = torch.randn(rows, 1104, generator=generator)
        out = torch.full((rows, 80), torch.nan)
        Program([packed.times_gated(planes(x), out, bias=bias, way=way)]).run()
        gate, up = product(x, Int8Weight(weight), way, bias=bias).chunk(2, dim=1)
        torch.testing.assert_close(out, silu(gate) * up, rtol=3e-4, atol=1e-6)
        for row in range(0, rows, 7):
            alone = torch.empty(1, 80)
            some = planes(x[row : row + 1])
            Program([packed.times_gated(some, alone, bias=bias, way=way)]).run()
            assert torch.equal(alone[0], out[row])


def test_a_product_keeps_all_that_its_threads_read() -> None:
    packed, x, y = Int8Weight(torch.randn(48, 64)), planes(torch.randn(2, 64)), torch.empty(2, 48)
    kept = list(map(id, packed.times(x, y, bias=(bias := torch.randn(48))).kept))
    assert all(id(each) in kept for each in (packed.panels, packed.scales, x, y, bias))


@pytest.mark.skipif(Way.TILES not in WAYS, reason="this processor has no AMX")
@pytest.mark.parametrize("rows", [0, 1, 16, 20])
def test_a_product_leaves_no_tiles_behind(rows: int) -> None:
    packed, y = Int8Weight(torch.randn(48, 64)), torch.empty(rows, 48)
    times = packed.times(planes(torch.randn(rows, 64)), y, way=Way.TILES)
    Program([times]).run(num_threads=1)
    assert not holds_tiles()


ELSEWHERE = """
import torch
from kernels.cpu import amx, simd_int8
from kernels.cpu.linear_int8 import Int8Weight
from tests.kernels.cpu.test_linear_int8 import product, product_of
x, weight = torch.randn(11, 208), torch.randn(70, 208)
assert torch.equal(product(x, Int8Weight(weight), None), product_of(x, weight, None, None))
assert not amx.available() and simd_int8.ways() == {ways}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of another kind")
@pytest.mark.parametrize(
    ("processor", "features", "ways"),
    [
        ("x86-64-v3", "+avx2,+fma,+f16c", ("avx2", "plain")),
        ("x86-64", "", ("plain",)),
    ],
)
def test_products_are_the_same_on_processors_without(
    processor: str, features: str, ways: tuple[str, ...]
) -> None:
    """Of what they lack nothing may be written into the loops: it could not be compiled."""
    numba = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features or "+sse2"}
    environ = os.environ | numba
    code = ELSEWHERE.format(ways=ways)
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
