"""Operations that Numba does not offer: memory at an address, atomics, 16-bit numbers, 2^x.

Each is a few LLVM instructions, inlined where it is used.  Addresses are int64, in bytes.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import cache, wraps
from hashlib import sha256
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
# Terms of e^(x ln 2) that float64 can tell apart where |x| <= 1/2, and of them float32.
_SERIES = [math.log(2) ** k / math.factorial(k) for k in range(15)]
_FLOAT_SERIES = [np.float32(term).item() for term in _SERIES[:8]]


@cache
def target_features() -> frozenset[str]:
    """Return what the processor that loops are compiled for can do, as LLVM says it: "+avx2"."""
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return frozenset(features.split(","))


@cache
def target_name() -> str:
    """Return LLVM's name of the processor that loops are compiled for, with a digest of features.

    Loops compiled for equal names compute equal bits.  The name alone does not say it: a machine
    may hide instructions that the processor has, and LLVM may not know the processor.
    """
    features = sorted(feature for feature in target_features() if feature.startswith("+"))
    digest = sha256(",".join(features).encode()).hexdigest()[:6]
    return f"{config.CPU_NAME or binding.get_host_cpu_name()}-{digest}"


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function for compiled loops, of these Numba types, from one that writes its LLVM.

    What is decorated takes the builder, then the arguments' LLVM values, and returns the result's.
    """
    signature = result(*arguments)
    # Numba wants a parameter for each argument; `write` may take them as `*operands`.
    names = ("context", *(f"operand{number}" for number in range(len(arguments))))
    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]

    def declared(write: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(write)
        def typed(_context: Any, *_arguments: Any) -> Any:
            def generate(context: Any, b: ir.IRBuilder, _signature: Any, values: Any) -> Any:
                value = write(b, *values)
                return context.get_dummy_value() if value is None else value

            return signature, generate

        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        function: Callable[..., Any] = intrinsic(typed)
        return function

    return declared


@instruction(types.int64, types.int64)
def atomic_load(b: ir.IRBuilder, address: Any) -> Any:
    """Return the int64 at an address as other threads have left it."""
    return b.load_atomic(_pointer(b, address, _I64), "seq_cst", 8)


@instruction(types.int64, types.int64, types.int64)
def fetch_add(b: ir.IRBuilder, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address, atomically, and return what it was."""
    return b.atomic_rmw("add", _pointer(b, address, _I64), amount, "seq_cst")


@instruction(types.int64, types.int64, types.int64)
def exchange(b: ir.IRBuilder, address: Any, value: Any) -> Any:
    """Write an int64 at an address, atomically, and return what it was."""
    return b.atomic_rmw("xchg", _pointer(b, address, _I64), value, "seq_cst")


@instruction(types.boolean, types.int64, types.int64, types.int64)
def compare_exchange(b: ir.IRBuilder, address: Any, expected: Any, value: Any) -> Any:
    """Write an int64 if it is as expected, atomically; return whether it was."""
    at = _pointer(b, address, _I64)
    return b.extract_value(b.cmpxchg(at, expected, value, "seq_cst"), 1)


@instruction(types.void)
def pause(b: ir.IRBuilder) -> None:
    """Tell the processor that this is a loop that waits."""
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])


@instruction(types.void, types.int64, types.int64, types.int64)
def call(b: ir.IRBuilder, function: Any, arguments: Any, thread: Any) -> None:
    """Call the task at an address on the arguments at another one, as thread number `thread`."""
    kind = ir.FunctionType(ir.VoidType(), [_I64, _I64])
    b.call(_pointer(b, function, kind), [arguments, thread])


@instruction(types.void, types.int64)
def prefetch(b: ir.IRBuilder, address: Any) -> None:
    """Ask for the cache line of an address, which need not be ours; nothing waits for it."""
    write_prefetch(b, address)


def write_prefetch(b: ir.IRBuilder, address: Any, *, cache: int = 1) -> None:
    """Write the instruction of `prefetch`, into the first cache or the second."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    # To read, into this cache and those after it, data.
    numbers = (ir.Constant(_I32, v) for v in (0, 4 - cache, 1))
    b.call(function, [b.inttoptr(address, pointer), *numbers])


@instruction(types.float32, types.float32)
def exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Return 2^x for float32 x <= 0 within two units in the last place, 2^-126 below that.

    Without a call or a branch, so that a loop over it is vectorized.
    """
    return _power_of_two(b, x, _F32, _I32, 23, _FLOAT_SERIES)


@instruction(types.float64, types.float64)
def exp2_double(b: ir.IRBuilder, x: Any) -> Any:
    """Return 2^x for float64 x <= 0 within two units in the last place, 2^-1022 below that."""
    return _power_of_two(b, x, _F64, _I64, 52, _SERIES)


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


@instruction(types.float32, types.int64)
def bfloat16_at(b: ir.IRBuilder, address: Any) -> Any:
    """Return the bfloat16 at an address as float32."""
    value = b.zext(b.load(_pointer(b, address, _I16), align=2), _I32)
    return b.bitcast(b.shl(value, ir.Constant(_I32, 16)), _F32)


@instruction(types.float32, types.int64)
def float16_at(b: ir.IRBuilder, address: Any) -> Any:
    """Return the float16 at an address as float32."""
    return b.fpext(b.load(_pointer(b, address, _F16), align=2), _F32)


def _array_at(kind: Any, stored: ir.Type) -> Callable[..., Any]:
    """Return the function that turns an address into a pointer, which is indexed like an array."""

    @instruction(types.CPointer(kind), types.int64)
    def at(b: ir.IRBuilder, address: Any) -> Any:
        return _pointer(b, address, stored)

    return at


floats_at, doubles_at = _array_at(types.float32, _F32), _array_at(types.float64, _F64)
bytes_at, shorts_at = _array_at(types.int8, ir.IntType(8)), _array_at(types.int16, _I16)
ints_at, longs_at = _array_at(types.int32, _I32), _array_at(types.int64, _I64)


def record_at(record: Any) -> Callable[..., Any]:
    """Return the function that gives the record of a Numba type at an address: it is not copied."""

    @instruction(record, types.int64)
    def at(b: ir.IRBuilder, address: Any) -> Any:
        return _pointer(b, address, ir.ArrayType(ir.IntType(8), record.size))

    return at


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def address_of(_context: Any, record: Any, field: Any) -> Any:
    """Return the address of a record's field, named by a string."""
    offset = ir.Constant(_I64, record.offset(field.literal_value))

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return b.add(b.ptrtoint(values[0], _I64), offset)

    return types.int64(record, field), generate


def _pointer(b: ir.IRBuilder, address: Any, stored: ir.Type) -> Any:
    return b.inttoptr(address, stored.as_pointer())
