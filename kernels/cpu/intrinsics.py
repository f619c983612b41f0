"""What Numba has no word for: memory at an address, bits of a float, a counter of several threads.

Each is a few LLVM instructions, inlined where it is used.  Addresses are int64, in bytes.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()
# Terms of e^(x ln 2) that float64 can tell apart where |x| <= 1/2, and of them float32.
_SERIES = [math.log(2) ** k / math.factorial(k) for k in range(15)]
_FLOAT_SERIES = [np.float32(term).item() for term in _SERIES[:8]]


def bits_of(value: float) -> int:
    """Return what `float_of_bits` turns into this value; for a task's words."""
    return int(np.float32(value).view(np.uint32))


@intrinsic
def fetch_add(_context, address, amount):  # type: ignore[no-untyped-def]
    """Add to the int64 at an address, atomically, and return what it was."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def float_of_bits(_context, bits):  # type: ignore[no-untyped-def]
    """Return the float32 whose bits are the low half of an integer."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.bitcast(b.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), generate


@intrinsic
def exp2(_context, x):  # type: ignore[no-untyped-def]
    """Return 2^x for float32 x <= 0 within two units in the last place, 2^-126 below that.

    Without a call or a branch, so that a loop over it is vectorized.
    """

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return _power_of_two(b, args[0], _F32, _I32, 23, _FLOAT_SERIES)

    return types.float32(types.float32), generate


@intrinsic
def exp2_double(_context, x):  # type: ignore[no-untyped-def]
    """Return 2^x for float64 x <= 0 within two units in the last place, 2^-1022 below that."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return _power_of_two(b, args[0], _F64, _I64, 52, _SERIES)

    return types.float64(types.float64), generate


def _power_of_two(
    b: ir.IRBuilder, x: Any, floats: ir.Type, bits: ir.Type, fraction: int, series: list[float]
) -> Any:
    """Write 2^x for numbers whose fraction has so many bits."""
    bias = (1 << (bits.width - 2 - fraction)) - 1
    least = ir.Constant(floats, 1.0 - bias)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    whole = b.fptosi(b.fsub(x, ir.Constant(floats, 0.5)), _I32)
    part = b.fsub(x, b.sitofp(whole, floats))
    power = ir.Constant(floats, series[-1])
    for coefficient in reversed(series[:-1]):
        power = b.fadd(b.fmul(power, part), ir.Constant(floats, coefficient))
    biased = b.add(whole, ir.Constant(_I32, bias))
    wide = biased if bits is _I32 else b.sext(biased, bits)
    exponent = b.shl(wide, ir.Constant(bits, fraction))
    return b.fmul(power, b.bitcast(exponent, floats))


@intrinsic
def brain_at(_context, address):  # type: ignore[no-untyped-def]
    """Return the bfloat16 at an address as float32."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        value = b.zext(b.load(b.inttoptr(args[0], _I16.as_pointer()), align=2), _I32)
        return b.bitcast(b.shl(value, ir.Constant(_I32, 16)), _F32)

    return types.float32(types.int64), generate


@intrinsic
def half_at(_context, address):  # type: ignore[no-untyped-def]
    """Return the float16 at an address as float32."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.fpext(b.load(b.inttoptr(args[0], ir.HalfType().as_pointer()), align=2), _F32)

    return types.float32(types.int64), generate


@intrinsic
def put_brain(_context, address, x):  # type: ignore[no-untyped-def]
    """Write a float32 as the nearest bfloat16, the even one of two."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        bits = b.bitcast(args[1], _I32)
        last = b.and_(b.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = b.add(bits, b.add(last, ir.Constant(_I32, 0x7FFF)))
        # The carry of a NaN could make it a number.
        quiet = b.or_(bits, ir.Constant(_I32, 0x400000))
        kept = b.select(b.fcmp_unordered("uno", args[1], args[1]), quiet, rounded)
        half = b.trunc(b.lshr(kept, ir.Constant(_I32, 16)), _I16)
        b.store(half, b.inttoptr(args[0], _I16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def put_half(_context, address, x):  # type: ignore[no-untyped-def]
    """Write a float32 as the nearest float16."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        half = b.fptrunc(args[1], ir.HalfType())
        b.store(half, b.inttoptr(args[0], ir.HalfType().as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


def _pointers_to(kind: Any, stored: ir.Type) -> Any:
    """Return the intrinsic that turns an address into a pointer, which is indexed like an array."""

    @intrinsic
    def at(_context, address):  # type: ignore[no-untyped-def]
        def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
            return b.inttoptr(args[0], stored.as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return at


floats_at, doubles_at = _pointers_to(types.float32, _F32), _pointers_to(types.float64, _F64)
ints_at, longs_at = _pointers_to(types.int32, _I32), _pointers_to(types.int64, _I64)


@intrinsic
def read(_context, address):  # type: ignore[no-untyped-def]
    """Return the int64 at an address as other threads have left it."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def exchange(_context, address, value):  # type: ignore[no-untyped-def]
    """Write an int64 at an address, atomically, and return what it was."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def replaced(_context, address, expected, value):  # type: ignore[no-untyped-def]
    """Write an int64 if it is as expected, atomically; return whether it was."""

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        at = b.inttoptr(args[0], _I64.as_pointer())
        return b.extract_value(b.cmpxchg(at, args[1], args[2], "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def fetch(_context, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line of an address, which need not be ours; nothing waits for it."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        prefetch(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(b: ir.IRBuilder, address: Any) -> None:
    """Write the instruction of `fetch`."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    # To read, into every cache, data.
    b.call(function, [b.inttoptr(address, pointer), *(ir.Constant(_I32, v) for v in (0, 3, 1))])


@intrinsic
def pause(_context):  # type: ignore[no-untyped-def]
    """Tell the processor that this is a loop that waits."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(_context, function, words, thread):  # type: ignore[no-untyped-def]
    """Call the task at an address on the words at another one, as thread number `thread`."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), _I64])
        words = b.inttoptr(args[1], _I64.as_pointer())
        b.call(b.inttoptr(args[0], kind.as_pointer()), [words, args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
