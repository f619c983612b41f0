"""Operations that Numba does not offer: memory at an address, atomics, 16-bit numbers, 2^x.

Each is a few LLVM instructions, inlined into its callers.  Addresses are int64, in bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache, wraps
from hashlib import sha256
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from kernels.cpu import llvm
from kernels.cpu.llvm import F32, I16, I32, I64

_F16, _F64 = ir.HalfType(), ir.DoubleType()
# ln(2)^k / k!, the coefficients of 2^x that matter where |x| <= 1/2; csrc/sampling.cu has the same.
POWER_SERIES = (
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.5252733804059841e-05,
    1.321548679014431e-06,
    1.01780860092397e-07,
    7.054911620801123e-09,
    4.4455382718708116e-10,
    2.5678435993488206e-11,
)
_FLOAT_SERIES = [np.float32(term).item() for term in POWER_SERIES[:8]]
# Weights of tokens are multiples of 2^-42; see `kernels.contract.SAMPLING`.
WEIGHT_BITS = 42
# 1.5 * 2^52: adding it to a small number rounds the number to an integer, which is then in the
# lowest bits.
_ROUNDING = 1.5 * 2.0**52
# A float64 whose last bit is worth 2^-42, also after 1 is added.
_UNIT_BASE = 2.0 ** (52 - WEIGHT_BITS)


@cache
def target_features() -> frozenset[str]:
    """Return the features of the processor that loops are compiled for, as LLVM names: "+avx2"."""
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return frozenset(features.split(","))


@cache
def target_name() -> str:
    """Return LLVM's name of the processor that loops are compiled for, with a digest of features.

    Loops compiled for equal names compute equal bits.  The name alone does not ensure that: a
    machine may hide instructions that the processor has, and LLVM may not know the processor.
    """
    features = sorted(feature for feature in target_features() if feature.startswith("+"))
    digest = sha256(",".join(features).encode()).hexdigest()[:6]
    return f"{config.CPU_NAME or binding.get_host_cpu_name()}-{digest}"


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a function that emits LLVM IR into one that compiled loops can call.

    `result` and `arguments` are Numba types.  The decorated function takes the IR builder and the
    arguments' LLVM values, and returns the result's value.
    """
    signature = result(*arguments)
    # Numba requires a parameter for each argument, while `write` may take `*operands`.
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
    """Load the int64 at an address atomically."""
    return b.load_atomic(_pointer(b, address, I64), "seq_cst", 8)


@instruction(types.int64, types.int64, types.int64)
def fetch_add(b: ir.IRBuilder, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address atomically, and return its earlier value."""
    return b.atomic_rmw("add", _pointer(b, address, I64), amount, "seq_cst")


@instruction(types.int64, types.int64, types.int64)
def exchange(b: ir.IRBuilder, address: Any, value: Any) -> Any:
    """Write the int64 at an address atomically, and return its earlier value."""
    return b.atomic_rmw("xchg", _pointer(b, address, I64), value, "seq_cst")


@instruction(types.boolean, types.int64, types.int64, types.int64)
def compare_exchange(b: ir.IRBuilder, address: Any, expected: Any, value: Any) -> Any:
    """Write an int64 if it equals `expected`, atomically; return whether it did."""
    at = _pointer(b, address, I64)
    return b.extract_value(b.cmpxchg(at, expected, value, "seq_cst"), 1)


@instruction(types.void)
def pause(b: ir.IRBuilder) -> None:
    """Tell the processor that this is a spin loop."""
    if platform.machine() in ("x86_64", "AMD64"):
        llvm.call(b, "x86.sse2.pause", ir.VoidType())


@instruction(types.void, types.int64, types.int64, types.int64)
def call(b: ir.IRBuilder, function: Any, arguments: Any, thread: Any) -> None:
    """Call the task at address `function` with the address of its arguments and a thread number."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    b.call(_pointer(b, function, kind), [arguments, thread])


@instruction(types.void, types.int64)
def prefetch(b: ir.IRBuilder, address: Any) -> None:
    """Prefetch the cache line of an address, which need not be valid; nothing waits for it."""
    write_prefetch(b, address)


def write_prefetch(b: ir.IRBuilder, address: Any, *, cache: int = 1) -> None:
    """Emit the instruction of `prefetch` for the first or the second cache level."""
    # Access (read), locality (this cache level and those after it), kind (data).
    numbers = (ir.Constant(I32, v) for v in (0, 4 - cache, 1))
    pointer = b.inttoptr(address, ir.IntType(8).as_pointer())
    llvm.call(b, "prefetch.p0i8", ir.VoidType(), pointer, *numbers)


@instruction(types.float32, types.float32)
def exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Return 2^x for float32 x <= 0 within two units in the last place; 2^-126 for smaller results.

    It has no call and no branch, so a loop over it is vectorized.
    """
    least = ir.Constant(F32, -126.0)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    whole = b.fptosi(b.fsub(x, ir.Constant(F32, 0.5)), I32)
    part = b.fsub(x, b.sitofp(whole, F32))
    power = ir.Constant(F32, _FLOAT_SERIES[-1])
    for coefficient in reversed(_FLOAT_SERIES[:-1]):
        power = b.fadd(b.fmul(power, part), ir.Constant(F32, coefficient))
    exponent = b.shl(b.add(whole, ir.Constant(I32, 127)), ir.Constant(I32, 23))
    return b.fmul(power, b.bitcast(exponent, F32))


@instruction(types.int64, types.float64)
def weight_of(b: ir.IRBuilder, x: Any) -> Any:
    """Return 2^x for float64 x <= 0 in units of 2^-42, rounded to nearest; 0 for NaN.

    The operations are those of csrc/sampling.cu, one by one, so results are bit-identical.
    """
    least, rounding = ir.Constant(_F64, -64.0), ir.Constant(_F64, _ROUNDING)
    x = b.select(b.fcmp_ordered(">", x, least), x, least)
    rounded = b.fadd(x, rounding)
    part = b.fsub(x, b.fsub(rounded, rounding))
    power = ir.Constant(_F64, POWER_SERIES[-1])
    for coefficient in reversed(POWER_SERIES[:-1]):
        power = b.fma(power, part, ir.Constant(_F64, coefficient))
    exponent = b.shl(b.bitcast(rounded, I64), ir.Constant(I64, 52))
    power = b.bitcast(b.add(b.bitcast(power, I64), exponent), _F64)
    base = ir.Constant(_F64, _UNIT_BASE)
    return b.sub(b.bitcast(b.fadd(power, base), I64), b.bitcast(base, I64))


@instruction(types.int32, types.int32)
def order_of(b: ir.IRBuilder, bits: Any) -> Any:
    """Return an int32 that orders float32 numbers, given their bits: -0 equals 0, NaN is last."""
    magnitude, zero = ir.Constant(I32, 0x7FFFFFFF), ir.Constant(I32, 0)
    is_negative = b.icmp_signed("<", bits, zero)
    ordered = b.select(is_negative, b.xor(bits, magnitude), bits)
    size = b.and_(bits, magnitude)
    ordered = b.select(b.icmp_signed("==", size, zero), zero, ordered)
    is_nan = b.icmp_signed(">", size, ir.Constant(I32, 0x7F800000))
    return b.select(is_nan, magnitude, ordered)


@instruction(types.float32, types.int64)
def bfloat16_at(b: ir.IRBuilder, address: Any) -> Any:
    """Return the bfloat16 at an address as float32."""
    value = b.zext(b.load(_pointer(b, address, I16), align=2), I32)
    return b.bitcast(b.shl(value, ir.Constant(I32, 16)), F32)


@instruction(types.float32, types.int64)
def float16_at(b: ir.IRBuilder, address: Any) -> Any:
    """Return the float16 at an address as float32."""
    return b.fpext(b.load(_pointer(b, address, _F16), align=2), F32)


def _array_at(kind: Any, stored: ir.Type) -> Callable[..., Any]:
    """Return a function that converts an address to a pointer, which is indexed like an array."""

    @instruction(types.CPointer(kind), types.int64)
    def at(b: ir.IRBuilder, address: Any) -> Any:
        return _pointer(b, address, stored)

    return at


floats_at, doubles_at = _array_at(types.float32, F32), _array_at(types.float64, _F64)
bytes_at, shorts_at = _array_at(types.int8, ir.IntType(8)), _array_at(types.int16, I16)
ints_at, longs_at = _array_at(types.int32, I32), _array_at(types.int64, I64)


def record_at(record: Any) -> Callable[..., Any]:
    """Return a function that accesses the record of a Numba type at an address without a copy."""

    @instruction(record, types.int64)
    def at(b: ir.IRBuilder, address: Any) -> Any:
        return _pointer(b, address, ir.ArrayType(ir.IntType(8), record.size))

    return at


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def address_of(_context: Any, record: Any, field: Any) -> Any:
    """Return the address of a record's field, named by a string."""
    offset = ir.Constant(I64, record.offset(field.literal_value))

    def generate(_target: Any, b: ir.IRBuilder, _signature: Any, values: Any) -> Any:
        return b.add(b.ptrtoint(values[0], I64), offset)

    return types.int64(record, field), generate


def _pointer(b: ir.IRBuilder, address: Any, stored: ir.Type) -> Any:
    return b.inttoptr(address, stored.as_pointer())
