"""Compute rows in registers and write them as bfloat16: attention weights, gated pairs.

Vectors have 16 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu.intrinsics import instruction
from kernels.cpu.llvm import (
    F32,
    I32,
    Loop,
    call,
    fma,
    i64,
    in_order,
    larger,
    load,
    shuffled,
    smaller,
    splat,
    store,
    vector_of,
)
from kernels.cpu.simd import PANEL, rounded
from kernels.cpu.tasks import inner

# Keys of a tile: more than in float32, because each tile costs a pass over the sums.
LONG_TILE = 128
# Rows whose weights are computed together: four rows' numbers are one vector.
ROWS = 4
# Weights may be as large as 2 to this power: a float32 sum of such weights is far from overflow.
_SLACK = 32.0
_LANES = 16
_PARTS = LONG_TILE // _LANES
_INTS, _FLOATS = ir.VectorType(I32, _LANES), ir.VectorType(F32, _LANES)
# The best polynomial of its degree for 2^x that is 1 at 0: its error, 1e-4, is a twentieth of
# bfloat16's.
_SERIES = [1.0, *(np.float32(c).item() for c in (0.69328294, 0.24221101, 0.05500887))]
_MASK = ir.IntType(ROWS)
_SHIFT = 1.5 * 2**23
_LOG2_E = np.float32(math.log2(math.e)).item()


@inner
def weigh_rows(scores: int, weights: int, bounds: int, state: int, kept: int) -> Any:
    """Turn ROWS rows of LONG_TILE scores into bfloat16 weights; return whether a base changed.

    A weight is 2^(score - base).  A row's base is an integer that no score so far exceeds by more
    than _SLACK, so it changes seldom, and rescaling by a power of 2 is exact.  `state` [ROWS, 2] is
    each row's base and sum of weights so far; both are updated.  Keys outside a row's `bounds`
    [ROWS, 2] int32 get weight 0; address 0 means no bounds.  If a base changed, `kept` [ROWS]
    float32 is set to the factors by which the rows' sums so far must be multiplied.
    """
    # In two passes: a processor that predicts that no base changes, which is mostly right, computes
    # weights before it has the largest score.
    if bounds == 0:
        is_changed = _raise_all(scores, state, kept)
        _weigh_all(scores, weights, state)
    else:
        is_changed = _raise_some(scores, bounds, state, kept)
        _weigh_some(scores, weights, bounds, state)
    return is_changed


@instruction(types.boolean, *[types.int64] * 3)
def _raise_all(b: ir.IRBuilder, scores: Any, state: Any, kept: Any) -> Any:
    return _raise(b, scores, None, state, kept)


@instruction(types.boolean, *[types.int64] * 4)
def _raise_some(b: ir.IRBuilder, scores: Any, bounds: Any, state: Any, kept: Any) -> Any:
    return _raise(b, scores, bounds, state, kept)


def _raise(b: ir.IRBuilder, scores: Any, bounds: Any | None, state: Any, kept: Any) -> Any:
    """Raise the bases that a score exceeds too far, and write the factors for sums so far."""

    highest = []
    for row in range(ROWS):
        lanes = [_score(b, scores, row, part) for part in range(_PARTS)]
        if bounds is not None:
            nothing, seen = vector_of(_FLOATS, float("-inf")), _seen(b, bounds, row)
            lanes = [b.select(is_seen, x, nothing) for is_seen, x in zip(seen, lanes, strict=True)]
        highest.append(_joined(lanes, partial(larger, b)))
    level = _joined_lanes(b, highest, partial(larger, b))
    base, total = _bases_and_totals(b, state)
    is_over = b.fcmp_ordered(">", level, b.fadd(base, vector_of(base.type, _SLACK)))
    is_changed = b.icmp_unsigned("!=", b.bitcast(is_over, _MASK), _MASK(0))
    with b.if_then(is_changed, likely=False):
        raised = b.select(is_over, call(b, f"ceil.v{ROWS}f32", level.type, level), base)
        factor = _power_of_two(b, b.fsub(base, raised))
        store(b, factor, kept)
        _store_state(b, raised, b.fmul(total, factor), state)
    return is_changed


@instruction(types.void, *[types.int64] * 3)
def _weigh_all(b: ir.IRBuilder, scores: Any, weights: Any, state: Any) -> None:
    _weigh(b, scores, weights, None, state)


@instruction(types.void, *[types.int64] * 4)
def _weigh_some(b: ir.IRBuilder, scores: Any, weights: Any, bounds: Any, state: Any) -> None:
    _weigh(b, scores, weights, bounds, state)


def _weigh(b: ir.IRBuilder, scores: Any, weights: Any, bounds: Any | None, state: Any) -> None:
    """Emit code that writes the weights 2^(score - base), and adds each row's sum to its total.

    Keys outside `bounds` get weight 0.  `state` has the totals and the bases, raised before.
    """

    def add(x: Any, y: Any) -> Any:
        return in_order(b, b.fadd(x, y))

    base, total = _bases_and_totals(b, state)
    totals = []
    for row in range(ROWS):
        seen = None if bounds is None else _seen(b, bounds, row)
        lowered = splat(b, b.extract_element(base, ir.Constant(I32, row)), _LANES)
        found = []
        for part in range(_PARTS):
            weight = _exp2(b, b.fsub(_score(b, scores, row, part), lowered))
            if seen is not None:
                weight = b.select(seen[part], weight, vector_of(_FLOATS, 0.0))
            at = (row * LONG_TILE + part * _LANES) * 2
            _store_short(b, weight, b.add(weights, i64(at)))
            found.append(weight)
        totals.append(_joined(found, add))
    _store_state(b, base, add(total, _joined_lanes(b, totals, add)), state)


def _bases_and_totals(b: ir.IRBuilder, state: Any) -> tuple[Any, Any]:
    both = load(b, state, ir.VectorType(F32, 2 * ROWS))
    base, total = (shuffled(b, both, both, [*range(half, 2 * ROWS, 2)]) for half in range(2))
    return base, total


def _store_state(b: ir.IRBuilder, base: Any, total: Any, state: Any) -> None:
    woven = [lane // 2 + lane % 2 * ROWS for lane in range(2 * ROWS)]
    store(b, shuffled(b, base, total, woven), state)


@instruction(types.void, *[types.int64] * 3, *[types.float32] * 4)
def gate_pair(
    b: ir.IRBuilder, gate: Any, up: Any, out: Any, linear: Any, cubic: Any, limit: Any, shift: Any
) -> None:
    """Write activation(gate) * up of PANEL numbers as bfloat16; see `gated`."""
    _store_short(b, gated(b, gate, up, linear, cubic, limit, shift), out)


def gated(
    b: ir.IRBuilder, gate: Any, up: Any, linear: Any, cubic: Any, limit: Any, shift: Any
) -> Any:
    """Emit activation(gate) * up of PANEL float32 numbers, with a relative error of 1e-4.

    The last four parameters are the fields of `kernels.Activation`.
    """
    assert PANEL == _LANES
    most, least = splat(b, limit, _LANES), splat(b, b.fneg(limit), _LANES)
    x, factor = (smaller(b, most, load(b, at, _FLOATS)) for at in (gate, up))
    factor = b.fadd(larger(b, least, factor), splat(b, shift, _LANES))
    one, zero = (vector_of(_FLOATS, value) for value in (1.0, 0.0))
    # e^-|x| never overflows; the other half of the sigmoid is its complement.
    square = b.fmul(b.fmul(splat(b, cubic, _LANES), x), x)
    steep = b.fmul(x, b.fadd(splat(b, linear, _LANES), square))
    is_positive = b.fcmp_ordered(">", x, zero)
    negative = b.select(is_positive, b.fsub(zero, steep), steep)
    small = _exp2(b, b.fmul(negative, vector_of(_FLOATS, _LOG2_E)))
    share = b.fdiv(b.select(is_positive, one, small), b.fadd(one, small))
    return b.fmul(b.fmul(x, factor), share)


@instruction(types.void, types.int64, types.float32, types.int64, types.int64)
def write_bfloat16(b: ir.IRBuilder, source: Any, factor: Any, target: Any, count: Any) -> None:
    """Write float32 numbers, times a factor, as bfloat16; `count` is a multiple of 16."""
    loop = Loop(b, count, _LANES)
    x = load(b, b.add(source, b.mul(loop.index, i64(4))), _FLOATS)
    _store_short(b, b.fmul(x, splat(b, factor, _LANES)), b.add(target, b.mul(loop.index, i64(2))))
    loop.end([])


def _score(b: ir.IRBuilder, scores: Any, row: int, part: int) -> Any:
    return load(b, b.add(scores, i64((row * LONG_TILE + part * _LANES) * 4)), _FLOATS)


def _seen(b: ir.IRBuilder, bounds: Any, row: int) -> list[Any]:
    """Return for each part of a row a mask of the keys that are within the bounds."""
    start, stop = (
        splat(b, load(b, b.add(bounds, i64(8 * row + at)), I32), _LANES) for at in (0, 4)
    )
    seen = []
    for first in range(0, LONG_TILE, _LANES):
        keys = ir.Constant(_INTS, [first + lane for lane in range(_LANES)])
        seen.append(b.and_(b.icmp_signed(">=", keys, start), b.icmp_signed("<", keys, stop)))
    return seen


def _store_short(b: ir.IRBuilder, x: Any, address: Any) -> None:
    store(b, rounded(b, x), address, 2)


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """Emit 2^x, as exact as bfloat16 can represent; 2^-126 for smaller results."""
    x = larger(b, x, vector_of(x.type, -126.0))
    # Adding _SHIFT rounds to the nearest integer, which is then in the last bits.
    shifted = in_order(b, b.fadd(x, vector_of(x.type, _SHIFT)))
    part = b.fsub(x, in_order(b, b.fsub(shifted, vector_of(x.type, _SHIFT))))
    exponent = b.shl(b.bitcast(shifted, _INTS), vector_of(_INTS, 23))
    power = vector_of(x.type, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        power = fma(b, power, part, vector_of(x.type, coefficient))
    return b.bitcast(b.add(b.bitcast(power, _INTS), exponent), x.type)


def _power_of_two(b: ir.IRBuilder, x: Any) -> Any:
    """Emit 2^x for integers x <= 0; 0 if the result is no normal float32."""
    ints = ir.VectorType(I32, x.type.count)
    exponent = b.fptosi(larger(b, x, vector_of(x.type, -127.0)), ints)
    return b.bitcast(b.shl(b.add(exponent, vector_of(ints, 127)), vector_of(ints, 23)), x.type)


def _joined(vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Reduce a power of two of vectors to one, pairwise by `join`."""
    while len(vectors) > 1:
        vectors = [join(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _joined_lanes(b: ir.IRBuilder, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Return a vector with the lanes of each vector reduced by `join`, half by half.

    Two vectors are joined into one, their halves side by side, until one vector is left.
    """
    width = vectors[0].type.count
    while width > 1:
        width //= 2
        count = vectors[0].type.count * min(2, len(vectors))
        halves = [[lane for lane in range(count) if lane // width % 2 == half] for half in (0, 1)]
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        vectors = [join(*(shuffled(b, x, y, half) for half in halves)) for x, y in pairs]
    return vectors[0]
