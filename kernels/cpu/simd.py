"""Inner loops that Numba would not vectorize by itself, written as LLVM IR.

Each builder returns a function for compiled loops that takes addresses (int64) and strides in
bytes.  16-bit elements are widened in registers: memory transfers half the bytes, and every product
and sum is float32.  Vectors are 8 wide, or as wide as a panel; LLVM splits or joins them for the
processor.  Addresses need only the alignment of their element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.intrinsics import instruction, target_features, write_prefetch
from kernels.cpu.llvm import (
    F32,
    I16,
    I32,
    Loop,
    fma,
    i64,
    in_order,
    load,
    shuffled,
    splat,
    store,
    vector_of,
)
from kernels.cpu.tasks import inner

WIDTH = 8
# Columns of a panel: one vector of AVX-512, two of AVX2.
PANEL = 16
# Pairs of inputs that are summed before the result is added to the accumulator (see
# `pair_product`).
PAIRS = 16
# Dtypes of weights, keys and values; a loop takes the number of one as `element`.
ELEMENTS = ("float32", "bfloat16", "float16")
FLOAT32, BFLOAT16, FLOAT16 = range(3)
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_VECTOR, _INTS = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)
_HALVES = ir.VectorType(ir.HalfType(), WIDTH)
_STORED = {"float32": F32, "bfloat16": I16, "float16": ir.HalfType()}


@inner
def bytes_of(element: int) -> int:
    """Return the size in bytes of an element, given by its number."""
    return 4 if element == FLOAT32 else 2


def panel_product(
    max_rows: int, num_panels: int = 1, *, prefetch: bool = False
) -> Callable[..., Any]:
    """Return a function that computes y[r, p, :PANEL] = sum over k of x[r, k] w[p, k, :PANEL].

    The function takes (element, w, w_stride, x, x_stride, y, y_stride, depth, rows, is_added,
    panel_stride, later, later_stride).  Strides are in bytes: from k to k + 1 in w, between rows of
    x and of y, and between panels of w.  x and y are float32, and the panels of y are adjacent.
    The first min(rows, max_rows) rows are computed, plus the earlier y if `is_added`; depth is
    positive.  Every row is summed in the order of k, so it has the same bits alone and among other
    rows.  With `prefetch` the function also prefetches as many panels from `later` on,
    `later_stride` bytes for each k.
    """

    @instruction(types.void, *[types.int64] * 13)
    def product(b: ir.IRBuilder, *operands: Any) -> None:
        element, w, w_stride, *lines = operands[:7]
        depth, rows, is_added, panel_stride, *later = operands[7:]
        has_sums = b.icmp_signed("!=", is_added, i64(0))
        weights = (w, w_stride, panel_stride, depth)
        write = partial(_product, b, num_panels, weights, has_sums, later if prefetch else None)
        _write_each(b, element, rows, max_rows, lines, write)

    return product


def _write_each(
    b: ir.IRBuilder,
    element: Any,
    rows: Any,
    max_rows: int,
    lines: list[Any],
    write: Callable[[str, list[Any], list[Any]], None],
) -> None:
    """Emit a loop for each element type and number of rows, and the switch that selects one."""
    end = b.append_basic_block("end")
    kinds = [b.append_basic_block(kind) for kind in ELEMENTS]
    to_kind = b.switch(element, kinds[-1])
    for code, (kind, block) in enumerate(zip(ELEMENTS, kinds, strict=True)):
        to_kind.add_case(i64(code), block)
        b.position_at_end(block)
        write_each_size(b, rows, max_rows, lines, partial(write, kind))
        b.branch(end)
    b.position_at_end(end)


def write_each_size(
    b: ir.IRBuilder,
    rows: Any,
    max_rows: int,
    lines: list[Any],
    write: Callable[[list[Any], list[Any]], None],
) -> None:
    """Emit a loop for each number of rows, and the switch that selects one.

    Args:
        lines: Address of x, its row stride, address of y, its row stride.
        write: Emits a loop, given the addresses of its rows of x and of y.
    """
    x, x_stride, y, y_stride = lines
    end = b.append_basic_block("end")
    sizes = [b.append_basic_block(f"rows{index + 1}") for index in range(max_rows)]
    to_size = b.switch(rows, sizes[-1])
    for index, size in enumerate(sizes):
        if size is not sizes[-1]:
            to_size.add_case(i64(index + 1), size)
        b.position_at_end(size)
        x_rows = [b.add(x, b.mul(x_stride, i64(r))) for r in range(index + 1)]
        y_rows = [b.add(y, b.mul(y_stride, i64(r))) for r in range(index + 1)]
        write(x_rows, y_rows)
        b.branch(end)
    b.position_at_end(end)


def _product(
    b: ir.IRBuilder,
    num_panels: int,
    operands: Any,
    has_sums: Any,
    fetched: list[Any] | None,
    element: str,
    x_rows: list[Any],
    y_rows: list[Any],
) -> None:
    """Emit the loop of `panel_product` for these rows."""
    w, w_stride, panel_stride, depth = operands
    # Load a vector at a time: LLVM loads a longer one at once, and splits it in each iteration.
    lanes = PANEL if "+avx512f" in target_features() else WIDTH
    of_panel = PANEL // lanes
    cells = [(r, c) for r in range(len(x_rows)) for c in range(num_panels * of_panel)]
    panels = [b.add(w, b.mul(panel_stride, i64(p))) for p in range(num_panels)]
    befores = [_load(b, y_rows[r], c, lanes=lanes) for r, c in cells]
    starts = [b.select(has_sums, before, _zero(lanes)) for before in befores]
    loop = Loop(b, depth, 1)
    sums = [loop.carry(start) for start in starts]
    step = b.mul(loop.index, w_stride)
    rows_of_w = [b.add(panel, step) for panel in panels]
    weights = [_load(b, at, c, element, lanes=lanes) for at in rows_of_w for c in range(of_panel)]
    if fetched is not None:
        later = b.add(fetched[0], b.mul(loop.index, fetched[1]))
        for p in range(num_panels):
            write_prefetch(b, b.add(later, b.mul(panel_stride, i64(p))))
    offset = b.mul(loop.index, i64(4))
    values = [splat(b, load(b, b.add(row, offset), F32), lanes) for row in x_rows]
    totals = [
        fma(b, weights[c], values[r], total) for (r, c), total in zip(cells, sums, strict=True)
    ]
    loop.end(totals)
    for (r, c), total in zip(cells, totals, strict=True):
        _store(b, total, y_rows[r], c)


def pair_product(max_rows: int) -> Callable[..., Any]:
    """Return a function for y[r, :PANEL] = sum over k of x[r, k] w[k, :PANEL] from bfloat16.

    The function takes (w, x, x_stride, y, y_stride, num_steps, rows, is_added).  A step has PAIRS
    pairs of k, for which w has `[16, PANEL, 2]` and a row of x `[16, 2]`; y is float32.  The first
    min(rows, max_rows) rows are computed, plus the earlier y if `is_added`, in the order of the
    processor's tiles (see `kernels.cpu.amx`): a step's products of even and of odd k are summed
    separately.
    """

    @instruction(types.void, *[types.int64] * 8)
    def product(b: ir.IRBuilder, *operands: Any) -> None:
        w, *lines, num_steps, rows, is_added = operands
        write = partial(_pair_product, b, w, num_steps, is_added)
        write_each_size(b, rows, max_rows, lines, write)

    return product


def _pair_product(
    b: ir.IRBuilder, w: Any, num_steps: Any, is_added: Any, x_rows: list[Any], y_rows: list[Any]
) -> None:
    """Emit the loops of `pair_product` for these rows."""
    cells = [(r, c) for r in range(len(x_rows)) for c in range(PANEL // WIDTH)]
    has_sums = b.icmp_signed("!=", is_added, i64(0))
    starts = [b.select(has_sums, _load(b, y_rows[r], c), _zero()) for r, c in cells]
    steps = Loop(b, num_steps, 1)
    sums = [steps.carry(start) for start in starts]
    w_step = b.add(w, b.mul(steps.index, i64(PAIRS * PANEL * 4)))
    x_step = b.mul(steps.index, i64(PAIRS * 4))
    pairs = Loop(b, i64(PAIRS), 1)
    even, odd = ([pairs.carry(_zero()) for _ in cells] for _ in range(2))
    at = b.add(w_step, b.mul(pairs.index, i64(PANEL * 4)))
    weights = [_pair(b, at, c) for c in range(PANEL // WIDTH)]
    offset = b.add(x_step, b.mul(pairs.index, i64(4)))
    values = [_pair(b, b.add(row, offset), None) for row in x_rows]
    totals = [
        [
            fma(b, weights[c][half], values[r][half], total)
            for (r, c), total in zip(cells, so_far, strict=True)
        ]
        for half, so_far in enumerate((even, odd))
    ]
    pairs.end(totals[0] + totals[1])
    sums = [
        in_order(b, b.fadd(total, in_order(b, b.fadd(first, second))))
        for total, first, second in zip(sums, *totals, strict=True)
    ]
    steps.end(sums)
    for (r, c), total in zip(cells, sums, strict=True):
        _store(b, total, y_rows[r], c)


def _pair(b: ir.IRBuilder, address: Any, index: int | None) -> tuple[Any, Any]:
    """Return the first and the second bfloat16 of each pair of a vector, widened to float32.

    Without an index, one pair is repeated in every lane.
    """
    if index is None:
        bits = splat(b, load(b, address, I32), WIDTH)
    else:
        bits = load(b, b.add(address, i64(index * WIDTH * 4)), _INTS)
    high, low = b.and_(bits, vector_of(_INTS, 0xFFFF0000)), b.shl(bits, vector_of(_INTS, 16))
    return b.bitcast(low, _VECTOR), b.bitcast(high, _VECTOR)


def key_dots(max_rows: int) -> Callable[..., Any]:
    """Return a function that computes y[r, j] = sum over d of x[r, d] w[j, d] for four keys j.

    The function takes (element, w0, w1, w2, w3, x, x_stride, y, y_stride, depth, rows). Keys may be
    at any address; depth is a positive multiple of WIDTH.  The first min(rows, max_rows) rows are
    computed, and sums are added in a fixed order.
    """

    @instruction(types.void, *[types.int64] * 11)
    def dots(b: ir.IRBuilder, *operands: Any) -> None:
        element, *keys = operands[:5]
        *lines, depth, rows = operands[5:]
        _write_each(b, element, rows, max_rows, lines, partial(_dots, b, keys, depth))

    return dots


def _dots(
    b: ir.IRBuilder, keys: list[Any], depth: Any, element: str, x_rows: list[Any], y_rows: list[Any]
) -> None:
    """Emit the loop of `key_dots` for these rows."""
    loop = Loop(b, depth, WIDTH)
    sums = [[loop.carry(_zero()) for _ in keys] for _ in x_rows]
    step, offset = (b.mul(loop.index, i64(size)) for size in (ELEMENT_BYTES[element], 4))
    weights = [_load(b, b.add(key, step), 0, element) for key in keys]
    values = [_load(b, b.add(row, offset), 0) for row in x_rows]
    totals = [
        [fma(b, w, value, total) for w, total in zip(weights, row, strict=True)]
        for value, row in zip(values, sums, strict=True)
    ]
    loop.end([total for row in totals for total in row])
    for y, row in zip(y_rows, totals, strict=True):
        store(b, _sums(b, row), y)


@instruction(types.void, types.int64, types.int64, types.int64, types.int64)
def narrow(b: ir.IRBuilder, element: Any, source: Any, target: Any, count: Any) -> None:
    """Emit the loop that rounds `count` float32 numbers to bfloat16 or float16, ties to even.

    `count` must be a multiple of WIDTH.
    """
    kinds = {BFLOAT16: b.append_basic_block("bfloat16"), FLOAT16: b.append_basic_block("float16")}
    end = b.append_basic_block("end")
    b.cbranch(b.icmp_signed("==", element, i64(BFLOAT16)), kinds[BFLOAT16], kinds[FLOAT16])
    for kind, block in kinds.items():
        b.position_at_end(block)
        loop = Loop(b, count, WIDTH)
        x = _load(b, b.add(source, b.mul(loop.index, i64(4))), 0)
        short = rounded(b, x) if kind == BFLOAT16 else b.fptrunc(x, _HALVES)
        store(b, short, b.add(target, b.mul(loop.index, i64(2))), 2)
        loop.end([])
        b.branch(end)
    b.position_at_end(end)


@instruction(types.void, types.int64, types.int64, types.float32)
def add_scaled(b: ir.IRBuilder, target: Any, source: Any, scale: Any) -> None:
    """Add `scale` times PANEL float32 numbers at `source` to those at `target`."""
    added, before = (_load(b, at, 0, lanes=PANEL) for at in (source, target))
    store(b, fma(b, splat(b, scale, PANEL), added, before), target)


def rounded(b: ir.IRBuilder, x: Any) -> Any:
    """Return the bits of the nearest bfloat16 of each lane; NaN becomes a quiet NaN.

    A processor that has an instruction for it (AVX512-BF16) flushes numbers below 2^-126 to zero.
    """
    lanes = x.type.count
    shorts, ints = ir.VectorType(I16, lanes), ir.VectorType(I32, lanes)
    if "+avx512bf16" in target_features():
        return b.bitcast(b.fptrunc(x, ir.VectorType(_Bfloat(), lanes)), shorts)

    bits = b.bitcast(x, ints)
    last = b.and_(b.lshr(bits, vector_of(ints, 16)), vector_of(ints, 1))
    up = b.add(bits, b.add(last, vector_of(ints, 0x7FFF)))
    # Rounding up could turn the bits of a NaN into another number.
    kept = b.select(b.fcmp_unordered("uno", x, x), b.or_(bits, vector_of(ints, 0x400000)), up)
    return b.trunc(b.lshr(kept, vector_of(ints, 16)), shorts)


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


def _zero(lanes: int = WIDTH) -> ir.Constant:
    return vector_of(ir.VectorType(F32, lanes), 0.0)


def _load(
    b: ir.IRBuilder, address: Any, index: int, element: str = "float32", *, lanes: int = WIDTH
) -> Any:
    """Load the index-th vector at an address, as float32."""
    stored, floats = (ir.VectorType(kind, lanes) for kind in (_STORED[element], F32))
    size = ELEMENT_BYTES[element]
    value = load(b, b.add(address, i64(index * lanes * size)), stored, size)
    if element == "bfloat16":
        ints = ir.VectorType(I32, lanes)
        return b.bitcast(b.shl(b.zext(value, ints), vector_of(ints, 16)), floats)
    return b.fpext(value, floats) if element == "float16" else value


def _store(b: ir.IRBuilder, value: Any, address: Any, index: int) -> None:
    store(b, value, b.add(address, i64(index * value.type.count * 4)))


def _sums(b: ir.IRBuilder, vectors: list[Any]) -> Any:
    """Sum each of four vectors: first halves, then lanes (0, 2) and (1, 3), then these two sums."""
    halves = [
        b.fadd(shuffled(b, v, v, [0, 1, 2, 3]), shuffled(b, v, v, [4, 5, 6, 7])) for v in vectors
    ]
    left, right = [
        b.fadd(shuffled(b, left, right, [0, 4, 1, 5]), shuffled(b, left, right, [2, 6, 3, 7]))
        for left, right in (halves[:2], halves[2:])
    ]
    return b.fadd(shuffled(b, left, right, [0, 1, 4, 5]), shuffled(b, left, right, [2, 3, 6, 7]))
