"""Rows that are computed in registers and written in bfloat16: weights of keys, gated pairs.

One pass over the row each, in vectors of 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.intrinsics import instruction, target_features
from kernels.cpu.simd import PANEL, i64, rounded
from kernels.cpu.tasks import inner

# Keys of a tile: more than in float32, for each costs a pass over the sums.
LONG_TILE = 128
_LANES = 16
_I32, _F32 = ir.IntType(32), ir.FloatType()
_SHORTS = ir.VectorType(ir.IntType(16), _LANES)
_INTS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(_F32, _LANES)
_SERIES = [np.float32(math.log(2) ** k / math.factorial(k)).item() for k in range(7)]
# Of these, what a bfloat16 can tell; float32 sums are multiplied with all of them.
_NUM_SHORT = 5
_LOG2_E = np.float32(math.log2(math.e)).item()


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


@cache
def _is_rounding_known() -> bool:
    """Whether the processor that loops are compiled for rounds to bfloat16 (AVX512-BF16)."""
    return "+avx512bf16" in target_features()


@inner
def weigh_row(scores: int, weights: int, start: int, stop: int, state: int) -> Any:
    """Turn a row of LONG_TILE scores into bfloat16 weights, 2^(score - maximum), in one pass.

    `state` is where the row's maximum and total so far are; both are brought up to date.  Keys
    outside [start, stop) weigh nothing.  Returns what the sums so far are to be multiplied with.
    """
    if start == 0 and stop == LONG_TILE:
        return _weigh_all(scores, weights, state)
    return _weigh_some(scores, weights, start, stop, state)


@instruction(types.float32, *[types.int64] * 3)
def _weigh_all(b: ir.IRBuilder, scores: Any, weights: Any, state: Any) -> Any:
    lanes = [_load(b, b.add(scores, i64(4 * n))) for n in range(0, LONG_TILE, _LANES)]
    return _weigh(b, lanes, weights, state)


@instruction(types.float32, *[types.int64] * 5)
def _weigh_some(
    b: ir.IRBuilder, scores: Any, weights: Any, start: Any, stop: Any, state: Any
) -> Any:
    lanes = [_seen(b, scores, n, start, stop) for n in range(0, LONG_TILE, _LANES)]
    return _weigh(b, lanes, weights, state)


def _weigh(b: ir.IRBuilder, lanes: list[Any], weights: Any, state: Any) -> Any:
    at_maximum = b.inttoptr(state, _F32.as_pointer())
    at_total = b.inttoptr(b.add(state, i64(4)), _F32.as_pointer())
    before, total = b.load(at_maximum), b.load(at_total)
    highest = _joined(b, lanes, lambda x, y: _larger(b, x, y))
    maximum = _larger(b, highest, before)
    # Until a key is seen the maximum is -inf; no weight may come of -inf - -inf.
    base = _larger(b, maximum, ir.Constant(_F32, -1e30))
    kept = _exp2(b, b.fsub(before, base))
    exponents = [b.fsub(lane, _splat(b, base)) for lane in lanes]
    found = [_exp2(b, exponent) for exponent in exponents]
    for n, weight in enumerate(found):
        _store(b, weight, b.add(weights, i64(2 * n * _LANES)))
    b.store(maximum, at_maximum)
    b.store(b.fadd(b.fmul(total, kept), _joined(b, found, b.fadd)), at_total)
    return kept


@instruction(types.void, *[types.int64] * 3)
def gate_pair(b: ir.IRBuilder, gate: Any, up: Any, out: Any) -> None:
    """Write silu(gate) * up of PANEL numbers each as bfloat16."""
    assert PANEL == _LANES
    x, factor = _load(b, gate), _load(b, up)
    one, zero = (ir.Constant(_FLOATS, [value] * _LANES) for value in (1.0, 0.0))
    # e^-|x| never overflows; the other half of the sigmoid is its complement.
    is_positive = b.fcmp_ordered(">", x, zero)
    negative = b.select(is_positive, b.fsub(zero, x), x)
    small = _exp2(b, b.fmul(negative, ir.Constant(_FLOATS, [_LOG2_E] * _LANES)))
    share = b.fdiv(b.select(is_positive, one, small), b.fadd(one, small))
    _store(b, b.fmul(b.fmul(x, factor), share), out)


def _load(b: ir.IRBuilder, address: Any) -> Any:
    return b.load(b.inttoptr(address, _FLOATS.as_pointer()), align=4)


def _store(b: ir.IRBuilder, x: Any, address: Any) -> None:
    if _is_rounding_known():
        # One instruction instead of eight; it takes numbers below 2^-126 for zero.
        short = b.bitcast(b.fptrunc(x, ir.VectorType(_Bfloat(), _LANES)), _SHORTS)
    else:
        short = rounded(b, x)
    b.store(short, b.inttoptr(address, short.type.as_pointer()), align=2)


def _seen(b: ir.IRBuilder, scores: Any, first: int, start: Any, stop: Any) -> Any:
    """Return the scores of the keys from `first` on, -inf for those outside [start, stop)."""
    x = _load(b, b.add(scores, i64(4 * first)))
    keys = ir.Constant(_INTS, [first + lane for lane in range(_LANES)])
    from_start = b.icmp_signed(">=", keys, _splat(b, b.trunc(start, _I32)))
    before_stop = b.icmp_signed("<", keys, _splat(b, b.trunc(stop, _I32)))
    nothing = ir.Constant(_FLOATS, [float("-inf")] * _LANES)
    return b.select(b.and_(from_start, before_stop), x, nothing)


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Write 2^x for x <= 0; 0 where that is no normal float32."""
    is_vector = isinstance(x.type, ir.VectorType)
    ints, name = (_INTS, "v16f32") if is_vector else (_I32, "f32")

    def constant(kind: Any, value: float) -> ir.Constant:
        return ir.Constant(kind, [value] * _LANES if is_vector else value)

    whole = _call(b, f"llvm.roundeven.{name}", x)
    part = b.fsub(x, whole)
    series = _SERIES[:_NUM_SHORT] if is_vector else _SERIES
    power = constant(x.type, series[-1])
    for coefficient in reversed(series[:-1]):
        power = _call(b, f"llvm.fma.{name}", power, part, constant(x.type, coefficient))
    exponent = b.shl(b.fptosi(whole, ints), constant(ints, 23))
    value = b.bitcast(b.add(b.bitcast(power, ints), exponent), x.type)
    is_normal = b.fcmp_ordered(">", x, constant(x.type, -126.0))
    return b.select(is_normal, value, constant(x.type, 0.0))


def _call(b: ir.IRBuilder, name: str, *operands: Any) -> Any:
    kind = ir.FunctionType(operands[0].type, [operand.type for operand in operands])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)


def _larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _joined(b: ir.IRBuilder, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Return one number of all lanes: vectors are joined, then halves, until one lane is left."""
    joined, *others = vectors
    for other in others:
        joined = join(joined, other)
    while (count := joined.type.count) > 1:
        halves = [range(count // 2), range(count // 2, count)]
        joined = join(
            *(
                b.shuffle_vector(
                    joined, joined, ir.Constant(ir.VectorType(_I32, len(it)), list(it))
                )
                for it in halves
            )
        )
    return b.extract_element(joined, ir.Constant(_I32, 0))


def _splat(b: ir.IRBuilder, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, _LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * _LANES))
