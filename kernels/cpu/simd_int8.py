"""Vector sums of int8 products: exact in int32, so the same on every processor.

A vector holds four inputs of each of 8 columns.  A processor with VNNI multiplies and adds them in
one instruction, one with AVX2 in three; others do it four times in int32.  Both kinds of
instructions take one side without a sign: x gives its own to w.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.amx import STEP_BYTES
from kernels.cpu.intrinsics import instruction, target_features, write_prefetch
from kernels.cpu.simd import PANEL, WIDTH, Loop, i64, write_each_size

# Inputs of a column that lie side by side.
QUAD = 4
_QUAD_BYTES = PANEL * QUAD
_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_INTS = ir.VectorType(_I32, WIDTH)
_SHORTS = ir.VectorType(_I16, 2 * WIDTH)
_BYTES = ir.VectorType(_I8, QUAD * WIDTH)


@cache
def ways() -> tuple[str, ...]:
    """Return how the processor that loops are compiled for can do it, the best way first."""
    features = target_features()
    if "+avx2" not in features:
        return ("plain",)
    has_vnni = "+avxvnni" in features or {"+avx512vnni", "+avx512vl"} <= features
    return ("vnni", "avx2", "plain") if has_vnni else ("avx2", "plain")


def byte_product(max_rows: int, way: str | None = None) -> Callable[..., Any]:
    """Return y[r, :PANEL] = sum over k of x[r, k] w[k, :PANEL], int32 from int8.

    The function takes (w, x, x_stride, y, y_stride, num_steps, rows, later): a step is of 64 k, of
    which w has `[16, PANEL, 4]`.  It computes the first min(rows, max_rows) rows and asks meanwhile
    for another panel at `later`.  `way` is one of `ways`, by itself the best.
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
    """Write the loop of `byte_product` for these rows."""
    vectors = range(PANEL // WIDTH)
    quads = Loop(b, b.mul(num_steps, i64(STEP_BYTES // _QUAD_BYTES)), 1)
    sums = [[quads.carry(_ints(0)) for _ in vectors] for _ in x_rows]
    along_w = b.mul(quads.index, i64(_QUAD_BYTES))
    along_x = b.mul(quads.index, i64(QUAD))
    write_prefetch(b, b.add(later, along_w))
    weights = [_load(b, b.add(w, b.add(along_w, i64(v * WIDTH * QUAD)))) for v in vectors]
    values = [_broadcast(b, b.add(row, along_x)) for row in x_rows]
    totals = [
        [_add_products(b, way, total, w, x) for w, total in zip(weights, row, strict=True)]
        for x, row in zip(values, sums, strict=True)
    ]
    quads.end([total for row in totals for total in row])
    for y, row in zip(y_rows, totals, strict=True):
        for v, total in enumerate(row):
            at = b.inttoptr(b.add(y, i64(v * WIDTH * 4)), _INTS.as_pointer())
            b.store(total, at, align=4)


def _add_products(b: ir.IRBuilder, way: str, total: Any, w: Any, x: Any) -> Any:
    """Add four products of int8 to each int32."""
    if way == "plain":
        for byte in range(QUAD):
            total = b.add(total, b.mul(_byte(b, w, byte), _byte(b, x, byte)))
        return total
    x, w = b.bitcast(x, _BYTES), b.bitcast(w, _BYTES)
    is_negative = b.icmp_signed("<", x, ir.Constant(_BYTES, None))
    size = b.select(is_negative, b.sub(ir.Constant(_BYTES, None), x), x)
    signed = _call(b, "avx2.psign.b", _BYTES, w, x)
    if way == "vnni":
        operands = (b.bitcast(it, _INTS) for it in (size, signed))
        return _call(b, "avx512.vpdpbusd.256", _INTS, total, *operands)
    # Two products of 128 * 127 at most are within 16 bits.
    pairs = _call(b, "avx2.pmadd.ub.sw", _SHORTS, size, signed)
    ones = ir.Constant(_SHORTS, [1] * _SHORTS.count)
    return b.add(total, _call(b, "avx2.pmadd.wd", _INTS, pairs, ones))


def _byte(b: ir.IRBuilder, quads: Any, index: int) -> Any:
    """Return one int8 of each four as int32."""
    high = b.shl(quads, _ints(24 - 8 * index))
    return b.ashr(high, _ints(24))


def _call(b: ir.IRBuilder, name: str, result: Any, *operands: Any) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}")
    return b.call(function, operands)


def _load(b: ir.IRBuilder, address: Any) -> Any:
    return b.load(b.inttoptr(address, _INTS.as_pointer()), align=4)


def _broadcast(b: ir.IRBuilder, address: Any) -> Any:
    quad = b.load(b.inttoptr(address, _I32.as_pointer()), align=4)
    undefined = ir.Constant(_INTS, ir.Undefined)
    first = b.insert_element(undefined, quad, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, _ints(0))


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * WIDTH)
