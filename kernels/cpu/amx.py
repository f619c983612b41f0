"""Matrix tiles of the processor (AMX): 16 rows by 16 columns of float32 sums in one register.

A step multiplies 16 rows of 32 bfloat16 with 16 columns of them: `tdpbf16ps`.  Each sum is taken
in one order, whatever stands beside it: of 32 products those of even and those of odd numbers are
added up by themselves, the two are added, and that is added to the sum.  Bit for bit the same, with
float32 vectors on any processor, is `kernels.cpu.simd.pair_product`; but tiles take numbers below
2^-126 for zero.  A step of int8 has 64 inputs, `tdpbssd`; its sums are int32 and exact.

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

# Rows of a tile; numbers of each row, and of each column of weights, that a step multiplies: of
# bfloat16 and of int8.
TILE_ROWS = 16
STEP = 32
BYTES_STEP = 64
# Bytes of a panel's weights for a step: 16 rows of 16 columns, of a pair of bfloat16 or four int8.
STEP_BYTES = 1024
CONFIGURATION_BYTES = 64
# Bytes of a tile's row: of a row of x for a step, of 16 sums.
ROW_BYTES = 64
_LINE_BYTES = 64
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux gives the tiles to who asks for them.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@cache
def available() -> bool:
    """Ask the system for the tiles, once; return whether this process has them."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not _are_known():
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


@cache
def _are_known() -> bool:
    """Whether the processor that loops are compiled for has these instructions."""
    return {"+amx-tile", "+amx-bf16", "+amx-int8"} <= target_features()


def configuration(first_rows: int, second_rows: int = 0) -> Configuration:
    """Return what `configure` loads: how many rows the first and the second tile of x have.

    Tiles 0 and 1, then 2 and 3, are the sums of the first and the second tile of x, which are tiles
    4 and 5; weights come into 6 and 7.  Without a second tile of x 0 to 3 are sums of the first and
    weights come into 5, 6 and 7.
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
    """Return tile configurations by number of rows below two tiles; index 0 is two full tiles.

    [32, CONFIGURATION_BYTES], kept for ever.
    """
    whole = configuration(TILE_ROWS, TILE_ROWS)
    rests = (
        configuration(min(n, TILE_ROWS), max(n - TILE_ROWS, 0)) for n in range(1, 2 * TILE_ROWS)
    )
    return np.stack((whole, *rests))


@instruction(types.void, types.int64)
def configure(b: ir.IRBuilder, address: Any) -> None:
    """Load what `configuration` returned from an address; every tile is zero then."""
    _tile(b, "ldtilecfg", _pointer(b, address))


@instruction(types.void)
def release(b: ir.IRBuilder) -> None:
    """Leave the tiles: a thread that uses none is cheaper to switch."""
    _tile(b, "tilerelease")


def tile_product(
    num_tiles: int, num_panels: int, *, prefetch: int = 0, of_bytes: bool = False
) -> Callable[..., Any]:
    """Return y[r, p, :16] = sum over k of x[r, k] w[p, k, :16], plus what y was, by tiles.

    The function takes (w, x, x_stride, y, y_stride, num_steps, is_added, panel_stride, later):
    addresses, and strides in bytes from row to row of x and y and from panel to panel of w.  x is
    bfloat16, 32 of them a step, and has as many rows as `configure` was told, in one or two tiles;
    w is `[num_steps, 16, 16, 2]` bfloat16 a panel: pairs of k, then columns; y is float32 and its
    panels lie side by side.  With `prefetch` 1, 2 or 4 it asks meanwhile for all, half or a quarter
    of as many steps of as many panels at `later`.
    `of_bytes` x and w are int8, 64 a step and four of k together, and y is int32.
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
                _ask(b, b.add(later, offsets[p]), loop.index, part, num_tiles)
            for r in tiles:
                _tile(b, multiply, _number(2 * r + p), _number(4 + r), _number(weights))
        loop.end([])
        for cell, r, p in cells:
            at = _pointer(b, b.add(y_rows[r], i64(p * ROW_BYTES)))
            _tile(b, "tilestored64", _number(cell), at, y_stride)

    return product


def _ask(b: ir.IRBuilder, start: Any, index: Any, size: int, cache: int) -> None:
    """Ask for the part of this index, of so many bytes, of what begins at an address.

    Into the first cache or the second: two tiles of rows and their weights fill the first.
    """
    part = b.add(start, b.mul(index, i64(size)))
    for line in range(0, size, _LINE_BYTES):
        write_prefetch(b, b.add(part, i64(line)), cache=cache)


def _load(b: ir.IRBuilder, tile: int, address: Any, stride: Any) -> None:
    _tile(b, "tileloadd64", _number(tile), _pointer(b, address), stride)


def _tile(b: ir.IRBuilder, name: str, *operands: Any) -> None:
    # Loops that may use tiles are compiled where there are none as well, and never reach them.
    if not _are_known():
        return
    call(b, f"x86.{name}", ir.VoidType(), *operands)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(I8, tile)


def _pointer(b: ir.IRBuilder, address: Any) -> Any:
    return b.inttoptr(address, I8.as_pointer())
