"""Vector sums of int8 products: exact in int32, so the same on every processor.

A vector has four inputs of each of 8 columns.  A processor with VNNI multiplies and adds them in
one instruction, one with AVX2 in three; others do it four times in int32.  The instructions of both
take one operand without a sign, so the sign of x is moved to w.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.amx import STEP_BYTES
from kernels.cpu.intrinsics import instruction, target_features, write_prefetch
from kernels.cpu.llvm import I8, I16, I32, Loop, call, i64, load, splat, store, vector_of
from kernels.cpu.simd import PANEL, WIDTH, write_each_size

# Inputs of a column that are adjacent.
QUAD = 4
_QUAD_BYTES = PANEL * QUAD
_INTS, _SHORTS = ir.VectorType(I32, WIDTH), ir.VectorType(I16, 2 * WIDTH)
_BYTES = ir.VectorType(I8, QUAD * WIDTH)


@cache
def ways() -> tuple[str, ...]:
    """Return the methods that the processor that loops are compiled for has, the fastest first."""
    features = target_features()
    if "+avx2" not in features:
        return ("plain",)
    has_vnni = "+avxvnni" in features or {"+avx512vnni", "+avx512vl"} <= features
    return ("vnni", "avx2", "plain") if has_vnni else ("avx2", "plain")


def byte_product(max_rows: int, way: str | None = None) -> Callable[..., Any]:
    """Return a function for y[r, :PANEL] = sum over k of x[r, k] w[k, :PANEL], int32 from int8.

    The function takes (w, x, x_stride, y, y_stride, num_steps, rows, later).  A step has 64 of k,
    for which w has `[16, PANEL, 4]`.  The first min(rows, max_rows) rows are computed, and another
    panel is prefetched from `later`.  `way` is one of `ways`; None for the fastest.
    """

    @instruction(types.void, *[types.int64] * 8)
    def product(b: ir.IRBuilder, *operands: Any) -> None:
        w, *lines, num_steps, rows, later = operands
        write = partial(_product, b, way or ways()[0], w, num_steps, later)
        write_each_size(b, rows, max_rows, lines, write)

    return product


def _product(
    b: ir.IRBuilder,
    way: str,
    w: Any,
    num_steps: Any,
    later: Any,
    x_rows: list[Any],
    y_rows: list[Any],
) -> None:
    """Emit the loop of `byte_product` for these rows."""
    vectors = range(PANEL // WIDTH)
    quads = Loop(b, b.mul(num_steps, i64(STEP_BYTES // _QUAD_BYTES)), 1)
    sums = [[quads.carry(vector_of(_INTS, 0)) for _ in vectors] for _ in x_rows]
    along_w = b.mul(quads.index, i64(_QUAD_BYTES))
    along_x = b.mul(quads.index, i64(QUAD))
    write_prefetch(b, b.add(later, along_w))
    weights = [load(b, b.add(w, b.add(along_w, i64(v * WIDTH * QUAD))), _INTS) for v in vectors]
    values = [splat(b, load(b, b.add(row, along_x), I32), WIDTH) for row in x_rows]
    totals = [
        [_add_products(b, way, total, w, x) for w, total in zip(weights, row, strict=True)]
        for x, row in zip(values, sums, strict=True)
    ]
    quads.end([total for row in totals for total in row])
    for y, row in zip(y_rows, totals, strict=True):
        for v, total in enumerate(row):
            store(b, total, b.add(y, i64(v * WIDTH * 4)))


def _add_products(b: ir.IRBuilder, way: str, total: Any, w: Any, x: Any) -> Any:
    """Emit the addition of four int8 products to each int32."""
    if way == "plain":
        for byte in range(QUAD):
            total = b.add(total, b.mul(_byte(b, w, byte), _byte(b, x, byte)))
        return total
    x, w = b.bitcast(x, _BYTES), b.bitcast(w, _BYTES)
    is_negative = b.icmp_signed("<", x, ir.Constant(_BYTES, None))
    size = b.select(is_negative, b.sub(ir.Constant(_BYTES, None), x), x)
    signed = call(b, "x86.avx2.psign.b", _BYTES, w, x)
    if way == "vnni":
        operands = (b.bitcast(it, _INTS) for it in (size, signed))
        return call(b, "x86.avx512.vpdpbusd.256", _INTS, total, *operands)
    # The sum of two products, 128 * 127 each at most, fits 16 bits.
    pairs = call(b, "x86.avx2.pmadd.ub.sw", _SHORTS, size, signed)
    ones = vector_of(_SHORTS, 1)
    return b.add(total, call(b, "x86.avx2.pmadd.wd", _INTS, pairs, ones))


def _byte(b: ir.IRBuilder, quads: Any, index: int) -> Any:
    """Return one int8 of each group of four as int32."""
    high = b.shl(quads, vector_of(_INTS, 24 - 8 * index))
    return b.ashr(high, vector_of(_INTS, 24))
