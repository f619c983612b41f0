"""The tiles do what their manual says, bit for bit; where the processor has them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from llvmlite import binding
from numba import njit

from kernels.cpu import amx
from tests.kernels.cpu.paired import holds_tiles, tile_sums

needs_tiles = pytest.mark.skipif(not amx.available(), reason="this processor has no AMX")
STEPS = 3
DEPTH = STEPS * amx.STEP


def test_who_has_no_tiles_is_told_so() -> None:
    if not binding.get_host_cpu_features().get("amx-bf16", False):
        assert not amx.available()


ELSEWHERE = """
import torch
from kernels.cpu.bfloat16_methods import Way, known_ways
from tests.kernels.cpu.test_attention_bfloat16 import attended
from tests.kernels.cpu.test_linear_int8 import ELSEWHERE
got, want = attended([(40, 40)], None, Way.VECTORS, head_dim=64)
torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
assert known_ways() == [Way.VECTORS]
exec(ELSEWHERE.format(ways=("avx2", "plain")))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of another kind")
@pytest.mark.full("it compiles all loops for another processor")
def test_loops_that_may_use_tiles_run_where_there_are_none() -> None:
    processor = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    environ = os.environ | processor
    subprocess.run([sys.executable, "-c", ELSEWHERE], env=environ, check=True)


@pytest.mark.parametrize(("first", "second"), [(16, 16), (16, 3), (7, 0)])
def test_a_configuration_says_the_rows_of_each_tile(first: int, second: int) -> None:
    layout = amx.configuration(first, second)
    rows, row_bytes = layout[48:56].tolist(), layout[16:32:2].tolist()
    assert layout[0] == 1 and row_bytes == [64] * 8
    if second:
        assert rows == [first, first, second, second, first, second, 16, 16]
    else:
        assert rows == [first] * 5 + [16] * 3


def in_pairs(weight: torch.Tensor) -> torch.Tensor:
    """Return W [N, K] as panels [N / 16, K / 32, 16, 16, 2]."""
    panels = weight.view(-1, 16, STEPS, 16, 2)
    return panels.permute(0, 2, 3, 1, 4).contiguous()


@needs_tiles
@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "num_panels"),
    [(16, 16, 2), (16, 5, 2), (16, 16, 1), (16, 0, 4), (1, 0, 4), (9, 0, 3), (3, 0, 1)],
)
def test_products_are_summed_in_the_order_of_the_manual(
    first: int, second: int, num_panels: int, is_added: bool, prefetch: int
) -> None:
    product = amx.tile_product(2 if second else 1, num_panels, prefetch=prefetch)

    @njit
    def call(layout, *arguments):  # type: ignore[no-untyped-def]
        amx.configure(layout)
        product(*arguments)
        amx.release()

    rows, columns = first + second, 16 * num_panels
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, DEPTH, generator=generator).bfloat16()
    weight = torch.randn(columns, DEPTH, generator=generator).bfloat16()
    before = torch.randn(rows, columns, generator=generator)
    y, panels, layout = before.clone(), in_pairs(weight), amx.configuration(first, second)
    call(
        layout.ctypes.data,
        panels.data_ptr(), x.data_ptr(), 2 * DEPTH, y.data_ptr(), 4 * columns, STEPS,
        int(is_added), STEPS * amx.STEP_BYTES, panels.data_ptr(),
    )  # fmt: skip
    want = tile_sums(x, weight, before if is_added else torch.zeros_like(before))
    assert torch.equal(y, want)


@needs_tiles
def test_a_thread_holds_tiles_until_it_releases_them() -> None:
    @njit
    def hold(layout):  # type: ignore[no-untyped-def]
        amx.configure(layout)

    @njit
    def let_go():  # type: ignore[no-untyped-def]
        amx.release()

    layout = amx.configuration(16, 16)
    hold(layout.ctypes.data)
    assert holds_tiles()
    let_go()
    assert not holds_tiles()
