"""Matrix tiles of the processor (AMX): one register has the float32 sums of 16 rows by 16 columns.

A step, `tdpbf16ps`, multiplies 16 rows of 32 bfloat16 by 16 columns.  It adds to each sum in a
fixed order, whatever the other rows are: the products at even and at odd indices are summed
separately, the two sums are added, and the result is added to the accumulator.
`kernels.cpu.simd.pair_product` computes the same bits with float32 vectors on any processor, except
that tiles flush numbers below 2^-126 to zero.  A step of int8, `tdpbssd`, has 64 inputs; its sums
are int32 and exact.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, TDPBSSD.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from kernels.cpu.intrinsics import instruction, target_features, write_prefetch
from kernels.cpu.llvm import I8, Loop, call, i64

Configuration = npt.NDArray[np.uint8]

# Rows of a tile; inputs of a step in bfloat16 and in int8.
TILE_ROWS = 16
STEP = 32
BYTES_STEP = 64
# Bytes of a panel's weights in a step: 16 rows of 16 columns, each a pair of bfloat16 or four int8.
STEP_BYTES = 1024
CONFIGURATION_BYTES = 64
# Bytes of a tile's row: one row of x in a step, or 16 sums.
ROW_BYTES = 64
_LINE_BYTES = 64
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) requests permission from Linux to use tiles.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@cache
def available() -> bool:
    """Request permission to use tiles, once; return whether this process has it."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not _are_known():
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


@cache
def _are_known() -> bool:
    """Return whether the processor that loops are compiled for has these instructions."""
    return {"+amx-tile", "+amx-bf16", "+amx-int8"} <= target_features()


def configuration(first_rows: int, second_rows: int = 0) -> Configuration:
    """Return what `configure` loads for this many rows in the first and the second tile of x.

    With two tiles of x (tiles 4 and 5), tiles 0 and 1 are the sums of the first, 2 and 3 those of
    the second, and weights are loaded into 6 and 7.  With one tile of x (tile 4), tiles 0 to 3 are
    its sums, and weights are loaded into 5, 6 and 7.
    """
    layout = np.zeros(CONFIGURATION_BYTES, np.uint8)
    layout[0] = 1
    layout[16:32:2] = ROW_BYTES
    second = [second_rows, second_rows, first_rows, second_rows, TILE_ROWS, TILE_ROWS]
    alone = [first_rows, first_rows, first_rows, TILE_ROWS, TILE_ROWS, TILE_ROWS]
    layout[48:56] = [first_rows, first_rows, *(second if second_rows else alone)]
    return layout


@cache
def configurations() -> Configuration:
    """Return the tile configurations for 1 to 31 rows by number of rows; index 0 is two full tiles.

    The array is [32, CONFIGURATION_BYTES] and is never freed, because compiled code has its
    address.
    """
    whole = configuration(TILE_ROWS, TILE_ROWS)
    rests = (
        configuration(min(n, TILE_ROWS), max(n - TILE_ROWS, 0)) for n in range(1, 2 * TILE_ROWS)
    )
    return np.stack((whole, *rests))


@instruction(types.void, types.int64)
def configure(b: ir.IRBuilder, address: Any) -> None:
    """Load the configuration at an address, which also zeroes every tile."""
    _tile(b, "ldtilecfg", _pointer(b, address))


@instruction(types.void)
def release(b: ir.IRBuilder) -> None:
    """Release the tiles: a thread that uses none is cheaper to switch."""
    _tile(b, "tilerelease")


def tile_product(
    num_tiles: int, num_panels: int, *, prefetch: int = 0, of_bytes: bool = False
) -> Callable[..., Any]:
    """Return a function that computes y[r, p, :16] = sum over k of x[r, k] w[p, k, :16] by tiles.

    The function takes (w, x, x_stride, y, y_stride, num_steps, is_added, panel_stride, later):
    addresses, and strides in bytes between rows of x, rows of y and panels of w.  If `is_added`,
    the earlier y is added.  x is bfloat16, 32 per step, in one or two tiles with the number of rows
    set by `configure`; w is `[num_steps, 16, 16, 2]` bfloat16 per panel: pairs of k, then columns;
    y is float32 and its panels are adjacent.  With `prefetch` 1, 2 or 4 the function prefetches
    all, half or a quarter of the size of these weights from address `later`.  With `of_bytes` x and
    w are int8, 64 per step with four of k adjacent, and y is int32.
    """
    multiply = "tdpbssd" if of_bytes else "tdpbf16ps"

    @instruction(types.void, *[types.int64] * 9)
    def product(b: ir.IRBuilder, *operands: Any) -> None:
        w, x, x_stride, y, y_stride, num_steps, is_added, panel_stride, later = operands
        tiles, panels = range(num_tiles), range(num_panels)
        cells = [(2 * r + p, r, p) for r in tiles for p in panels]
        x_rows = [b.add(x, b.mul(x_stride, i64(TILE_ROWS * r))) for r in tiles]
        y_rows = [b.add(y, b.mul(y_stride, i64(TILE_ROWS * r))) for r in tiles]
        offsets = [b.mul(panel_stride, i64(p)) for p in panels]
        with b.if_else(b.icmp_signed("!=", is_added, i64(0))) as (added, fresh):
            with added:
                for cell, r, p in cells:
                    _load(b, cell, b.add(y_rows[r], i64(p * ROW_BYTES)), y_stride)
            with fresh:
                for cell, _, _ in cells:
                    _tile(b, "tilezero", _number(cell))
        loop = Loop(b, num_steps, 1)
        along_x = b.mul(loop.index, i64(ROW_BYTES))
        along_w = b.mul(loop.index, i64(STEP_BYTES))
        for r in tiles:
            _load(b, 4 + r, b.add(x_rows[r], along_x), x_stride)
        for p in panels:
            weights = 4 + num_tiles + p % (4 - num_tiles)
            at = b.add(offsets[p], along_w)
            _load(b, weights, b.add(w, at), i64(ROW_BYTES))
            if prefetch:
                part = STEP_BYTES // prefetch
                _prefetch_part(b, b.add(later, offsets[p]), loop.index, part, num_tiles)
            for r in tiles:
                _tile(b, multiply, _number(2 * r + p), _number(4 + r), _number(weights))
        loop.end([])
        for cell, r, p in cells:
            at = _pointer(b, b.add(y_rows[r], i64(p * ROW_BYTES)))
            _tile(b, "tilestored64", _number(cell), at, y_stride)

    return product


def _prefetch_part(b: ir.IRBuilder, start: Any, index: Any, size: int, cache: int) -> None:
    """Prefetch part number `index`, of `size` bytes, of the memory at `start`.

    `cache` 1 or 2 is the cache level: two tiles of rows and their weights fill the first.
    """
    part = b.add(start, b.mul(index, i64(size)))
    for line in range(0, size, _LINE_BYTES):
        write_prefetch(b, b.add(part, i64(line)), cache=cache)


def _load(b: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    _tile(b, "tileloadd64", _number(tile), _pointer(b, address), stride)


def _tile(b: ir.IRBuilder, name: str, *operands: Any) -> None:
    # Loops that may use tiles are also compiled for processors without them, which never run them.
    if not _are_known():
        return
    call(b, f"x86.{name}", ir.VoidType(), *operands)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(I8, tile)


def _pointer(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, I8.as_pointer())
