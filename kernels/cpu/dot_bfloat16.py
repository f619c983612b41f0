"""Multiply pairs of bfloat16 and add them to 16 float32 sums by one instruction (AVX512-BF16).

`vdpbf16ps` takes a pair of x and a pair of weights for each sum: the product of the pairs' second
numbers is added to the sum first, then that of their first numbers.  Products are exact, each
addition is rounded to nearest even, and numbers and sums below 2^-126 are flushed to zero.  A row
is therefore always summed over k = 1, 0, 3, 2, 5, 4, ..., whatever the other rows are; tiles
(`kernels.cpu.amx`) sum in another order.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.intrinsics import instruction, target_features, write_prefetch
from kernels.cpu.llvm import F32, I32, Loop, call, i64, load, splat, store, vector_of
from kernels.cpu.simd import PAIRS, PANEL, write_each_size

# Bytes of a pair, and of a panel's row of such pairs or of sums.
_PAIR_BYTES = 4
_ROW_BYTES = PANEL * _PAIR_BYTES
_PAIRS, _SUMS = ir.VectorType(I32, PANEL), ir.VectorType(F32, PANEL)


@cache
def available() -> bool:
    """Return whether the processor that loops are compiled for has this instruction."""
    return "+avx512bf16" in target_features()


def dot_product(max_rows: int, num_panels: int) -> Callable[..., Any]:
    """Return a function that computes y[r, p, :PANEL] = sum over k of x[r, k] w[p, k, :PANEL].

    The function takes (w, x, x_stride, y, y_stride, num_steps, rows, is_added, panel_stride,
    later): the arguments of `kernels.cpu.amx.tile_product` with `prefetch`, and the number of rows,
    of which it computes the first min(rows, max_rows).
    """

    @instruction(types.void, *[types.int64] * 10)
    def product(b: ir.IRBuilder, *operands: Any) -> None:
        # Emit nothing for other processors: loops are compiled for them too, but never run this.
        if not available():
            return
        w, *lines, num_steps, rows, is_added, panel_stride, later = operands
        starts = [b.mul(panel_stride, i64(p)) for p in range(num_panels)]
        panels = [b.add(w, start) for start in starts]
        fetched = [b.add(later, start) for start in starts]
        num_pairs = b.mul(num_steps, i64(PAIRS))
        has_sums = b.icmp_signed("!=", is_added, i64(0))
        write = partial(_product, b, panels, fetched, num_pairs, has_sums)
        write_each_size(b, rows, max_rows, lines, write)

    return product


def _product(
    b: ir.IRBuilder,
    panels: list[Any],
    fetched: list[Any],
    num_pairs: Any,
    has_sums: Any,
    x_rows: list[Any],
    y_rows: list[Any],
) -> None:
    """Emit the loop of `dot_product` for these panels and rows."""
    cells = [
        (r, p, b.add(y, i64(p * _ROW_BYTES)))
        for r, y in enumerate(y_rows)
        for p in range(len(panels))
    ]
    zero = vector_of(_SUMS, 0.0)
    befores = [b.select(has_sums, load(b, at, _SUMS), zero) for _, _, at in cells]
    loop = Loop(b, num_pairs, 1)
    sums = [loop.carry(before) for before in befores]
    along_x = b.mul(loop.index, i64(_PAIR_BYTES))
    along_w = b.mul(loop.index, i64(_ROW_BYTES))
    weights = [load(b, b.add(panel, along_w), _PAIRS) for panel in panels]
    for later in fetched:
        write_prefetch(b, b.add(later, along_w))
    values = [splat(b, load(b, b.add(row, along_x), I32), PANEL) for row in x_rows]
    totals = [
        call(b, "x86.avx512bf16.dpbf16ps.512", _SUMS, total, values[r], weights[p])
        for (r, p, _), total in zip(cells, sums, strict=True)
    ]
    loop.end(totals)
    for (_, _, at), total in zip(cells, totals, strict=True):
        store(b, total, at)
