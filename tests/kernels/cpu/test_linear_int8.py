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

from kernels.cpu.bfloat16_methods import Way
from kernels.cpu.linear_int8 import Int8Weight
from kernels.cpu.program import Program
from tests.kernels.cpu.int8 import product_of
from tests.kernels.cpu.paired import holds_tiles
from tests.kernels.cpu.weights import INT8_WAYS, inputs_of, product


@pytest.mark.parametrize("way", INT8_WAYS)
@settings(max_examples=25)
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


def test_a_column_of_zeros_is_zero() -> None:
    weight = torch.randn(16, 64)
    weight[3] = 0
    assert not product(torch.randn(5, 64), Int8Weight(weight), None)[:, 3].any()


@pytest.mark.parametrize("way", INT8_WAYS)
def test_the_largest_sums_are_within_32_bits(way: Way) -> None:
    depth = 133_136  # the last multiple of a panel below what is allowed
    x = torch.ones(1, depth)
    got = product(x, Int8Weight(torch.ones(16, depth)), way)
    torch.testing.assert_close(got, torch.full((1, 16), float(depth)))


def test_a_product_keeps_all_that_its_threads_read() -> None:
    packed, x, y = (
        Int8Weight(torch.randn(48, 64)),
        inputs_of(Int8Weight, torch.randn(2, 64)),
        torch.empty(2, 48),
    )
    kept = list(map(id, packed.times(x, y, bias=(bias := torch.randn(48))).kept))
    assert all(id(each) in kept for each in (packed.panels, packed.scales, x, y, bias))


@pytest.mark.skipif(Way.TILES not in INT8_WAYS, reason="this processor has no AMX")
@pytest.mark.parametrize("rows", [0, 1, 16, 20])
def test_a_product_leaves_no_tiles_behind(rows: int) -> None:
    packed, y = Int8Weight(torch.randn(48, 64)), torch.empty(rows, 48)
    times = packed.times(inputs_of(Int8Weight, torch.randn(rows, 64)), y, way=Way.TILES)
    Program([times]).run(num_threads=1)
    assert not holds_tiles()


ELSEWHERE = """
import torch
from kernels.cpu import simd_int8
from kernels.cpu.linear_int8 import Int8Weight
from tests.kernels.cpu.int8 import product_of
from tests.kernels.cpu.weights import product
x, weight = torch.randn(11, 208), torch.randn(70, 208)
assert torch.equal(product(x, Int8Weight(weight)), product_of(x, weight, None, None))
assert simd_int8.ways() == {ways}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of another kind")
def test_products_are_the_same_on_a_processor_without_vectors_for_them() -> None:
    """Of what it lacks nothing may be written into the loops: it could not be compiled."""
    numba = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}
    code = ELSEWHERE.format(ways=("plain",))
    subprocess.run([sys.executable, "-c", code], env=os.environ | numba, check=True)
