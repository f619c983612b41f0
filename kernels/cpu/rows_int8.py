"""Quantize rows for int8 products: two planes of int8 and a scale, in one pass.

A number is scale * (128 * high + low), which is 14 bits and a sign for the row's largest number, so
the rounding error is negligible and sums of planes are exact.  A quantized row is the plane of the
high parts, the plane of the low parts, and in its last four bytes the scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types

from kernels.cpu.intrinsics import instruction
from kernels.cpu.linear import ELEMENTS
from kernels.cpu.llvm import (
    F32,
    I8,
    I16,
    I32,
    Loop,
    call,
    i64,
    in_order,
    load,
    splat,
    store,
    vector_of,
)
from kernels.cpu.program import Operation
from kernels.cpu.rows_bfloat16 import gated
from kernels.cpu.simd import BFLOAT16, PANEL
from kernels.cpu.tasks import inner
from kernels.cpu.threads import for_each_row

# The number of int8 rows, which follows those of `kernels.cpu.simd.ELEMENTS`.
INT8 = len(ELEMENTS)
# The largest integer of a row: 127 in its high plane, as large as any weight.
LARGEST = 127 * 128
# Inputs of a step of the products.  A row is one step longer, so that rows are not a power of two
# apart.
_STEP = 64
_LANES = PANEL
_BYTES, _SHORTS = ir.VectorType(I8, _LANES), ir.VectorType(I16, _LANES)
_INTS, _FLOATS = ir.VectorType(I32, _LANES), ir.VectorType(F32, _LANES)
# Adding this to a float32 rounds it to an integer, which is then in the last bits.
_WHOLE, _WHOLE_BITS = 1.5 * 2**23, 0x4B400000
_INFINITY_BITS = 0x7F800000
# Rows whose largest number is smaller are zero: the inverse of their scale is no float32.
_LEAST = 2.0**-100


def room_for_planes(num_rows: int, size: int) -> torch.Tensor:
    """Return a buffer for quantized rows: [num_rows, 2 (size in whole steps + 64)] int8."""
    return torch.empty(num_rows, 2 * (-(-size // _STEP) * _STEP + _STEP), dtype=torch.int8)


class _Arguments(NamedTuple):
    num_rows: int
    size: int
    x: int
    element: int
    x_stride: int
    out: int
    out_stride: int
    taken: int = 0


def to_planes(x: torch.Tensor, out: torch.Tensor) -> Operation:
    """Return the operation that quantizes each row of x to two int8 planes and a scale in out.

    Args:
        x: [T, K] float32 or bfloat16, with any row stride, K a multiple of PANEL.
        out: [T, ...] created by `room_for_planes` for K or more.
    """
    assert x.dtype in (torch.float32, torch.bfloat16) and x.stride(1) == 1
    assert x.shape[1] % PANEL == 0 and len(x) == len(out)
    assert out.dtype is torch.int8 and out.shape[1] >= 2 * (x.shape[1] + 4)
    arguments = _Arguments(
        num_rows=len(x),
        size=x.shape[1],
        x=x.data_ptr(),
        element=ELEMENTS[x.dtype],
        x_stride=x.stride(0) * x.itemsize,
        out=out.data_ptr(),
        out_stride=out.stride(0),
    )
    return Operation(_to_planes, arguments, (x, out))


def _to_planes(a: _Arguments, _thread: int) -> None:
    for_each_row(a, _round_row, 0)


@inner
def _round_row(a: _Arguments, row: int, _: int) -> None:
    round_row(a.element, a.x + row * a.x_stride, a.size, a.out, row, a.out_stride)


@inner
def round_row(element: int, x: int, size: int, out: int, row: int, out_stride: int) -> None:
    """Quantize `size` numbers, a multiple of PANEL, to row number `row` of out."""
    to = out + row * out_stride
    if element == BFLOAT16:
        _round_bfloat16(x, size, to, out_stride)
    else:
        _round_float32(x, size, to, out_stride)


@instruction(types.void, *[types.int64] * 4)
def _round_float32(b: ir.IRBuilder, x: Any, size: Any, to: Any, stride: Any) -> None:
    def bits_at(index: Any) -> Any:
        return load(b, b.add(x, b.mul(index, i64(4))), _INTS, 1)

    _round(b, bits_at, size, to, stride)


@instruction(types.void, *[types.int64] * 4)
def _round_bfloat16(b: ir.IRBuilder, x: Any, size: Any, to: Any, stride: Any) -> None:
    def bits_at(index: Any) -> Any:
        short = load(b, b.add(x, b.mul(index, i64(2))), _SHORTS, 1)
        return b.shl(b.zext(short, _INTS), vector_of(_INTS, 16))

    _round(b, bits_at, size, to, stride)


def _round(b: ir.IRBuilder, bits_at: Any, size: Any, to: Any, stride: Any) -> None:
    """Quantize a row; `bits_at` returns the bits of _LANES float32 numbers from an index on."""
    loop = Loop(b, size, _LANES)
    most = loop.carry(vector_of(_INTS, 0))
    # Without their signs, bits are ordered as numbers are, and NaN is the largest.
    most = _larger(b, most, b.and_(bits_at(loop.index), vector_of(_INTS, 0x7FFFFFFF)))
    loop.end([most])
    bits = call(b, f"vector.reduce.smax.v{_LANES}i32", I32, most)
    largest, limit = b.bitcast(bits, F32), ir.Constant(F32, float(LARGEST))
    is_nothing = b.fcmp_ordered("<", largest, ir.Constant(F32, _LEAST))
    zero = ir.Constant(F32, 0.0)
    inverse = splat(b, b.select(is_nothing, zero, b.fdiv(limit, largest)), _LANES)
    scale = b.select(is_nothing, zero, b.fdiv(largest, limit))
    # A row that is not finite gets the scale NaN, so its results are NaN.
    is_finite = b.icmp_signed("<", bits, ir.Constant(I32, _INFINITY_BITS))
    scale = b.select(is_finite, scale, ir.Constant(F32, float("nan")))
    store(b, scale, b.add(to, b.sub(stride, i64(4))))
    low_plane = b.add(to, b.lshr(stride, i64(1)))
    loop = Loop(b, size, _LANES)
    exact = in_order(b, b.fmul(b.bitcast(bits_at(loop.index), _FLOATS), inverse))
    whole = b.bitcast(b.fadd(exact, vector_of(_FLOATS, _WHOLE)), _INTS)
    whole = b.sub(whole, vector_of(_INTS, _WHOLE_BITS))
    high = b.ashr(b.add(whole, vector_of(_INTS, 64)), vector_of(_INTS, 7))
    low = b.sub(whole, b.shl(high, vector_of(_INTS, 7)))
    for part, plane in ((high, to), (low, low_plane)):
        store(b, b.trunc(part, _BYTES), b.add(plane, loop.index), 1)
    loop.end([])


@instruction(types.void, *[types.int64] * 7)
def finish_sums(
    b: ir.IRBuilder,
    sums: Any,
    stride: Any,
    x_scale: Any,
    w_scales: Any,
    bias: Any,
    added: Any,
    out: Any,
) -> None:
    """Dequantize PANEL int32 sums to float32: (128 high + low) scales + bias + added.

    All arguments but `stride` are addresses; `bias` and `added` are 0 for none.  The sums of the
    low plane are `stride` bytes after those of the high plane.
    """
    high, low = (b.sitofp(load(b, at, _INTS, 1), _FLOATS) for at in (sums, b.add(sums, stride)))
    # A product with 128 is exact, so the sum is the same whether or not the compiler fuses both.
    total = in_order(b, b.fadd(b.fmul(high, vector_of(_FLOATS, 128.0)), low))
    row = splat(b, load(b, x_scale, F32), _LANES)
    scales = in_order(b, b.fmul(load(b, w_scales, _FLOATS, 1), row))
    value = in_order(b, b.fmul(total, scales))
    for more in (bias, added):
        is_there = b.icmp_signed("!=", more, i64(0))
        terms = load(b, b.select(is_there, more, w_scales), _FLOATS, 1)
        value = in_order(b, b.fadd(value, b.select(is_there, terms, vector_of(_FLOATS, 0.0))))
    store(b, value, out)


@instruction(types.void, *[types.int64] * 3, *[types.float32] * 4)
def gate_floats(
    b: ir.IRBuilder, gate: Any, up: Any, out: Any, linear: Any, cubic: Any, limit: Any, shift: Any
) -> None:
    """Write activation(gate) * up of PANEL numbers as float32; see `gated`."""
    store(b, gated(b, gate, up, linear, cubic, limit, shift), out)


def _larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)
