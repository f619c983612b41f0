"""What attention is made of in bfloat16: panels of keys and values, and products with them.

Keys and values of a tile are gathered once for all rows of a work item, into panels of pairs (see
`kernels.cpu.amx`): pairs along a head for the scores, pairs along the keys for the sums.  Scores,
totals and sums are float32; queries and weights are rounded to bfloat16 before a product.  Tiles
begin at multiples of their length whatever a work item is, so that a row's sums are taken in one
order, whether it is computed alone or in a prompt.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu import amx
from kernels.cpu.amx import STEP, STEP_BYTES, TILE_ROWS
from kernels.cpu.intrinsics import instruction, ints_at, shorts_at
from kernels.cpu.simd import PANEL, i64, pair_product
from kernels.cpu.tasks import inner

# Rows are computed up to whole ones of these.
ROWS_TOGETHER = 2 * TILE_ROWS
_PAIR_BYTES = 4
_ROW_BYTES = PANEL * _PAIR_BYTES
_FEW = 3
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_PAIRS, _SHORTS = ir.VectorType(_I32, PANEL), ir.VectorType(_I16, PANEL)

_two_tiles, _one_tile = amx.tile_product(2, 2), amx.tile_product(1, 2)
_by_vectors = pair_product(_FEW)


@inner
def turn_keys(keys: int, count: int, first: int, head_dim: int, panels: int) -> None:
    """Put keys that lie in a row, the `first` and so on, into panels [keys / 16, D / 2, 16, 2]."""
    pairs = head_dim // 2
    if count == PANEL and first % PANEL == 0:
        panel = panels + first // PANEL * pairs * _ROW_BYTES
        for pair in range(0, pairs, PANEL):
            _turn(keys + pair * _PAIR_BYTES, head_dim * 2, panel + pair * _ROW_BYTES)
        return
    for j in range(count):
        key = first + j
        source = ints_at(keys + j * head_dim * 2)
        target = ints_at(panels + (key // PANEL * pairs * PANEL + key % PANEL) * _PAIR_BYTES)
        for pair in range(pairs):
            target[pair * PANEL] = source[pair]


@inner
def pair_values(
    values: int, count: int, first: int, num_keys: int, head_dim: int, panels: int
) -> None:
    """Put values that lie in a row, the `first` and so on, into panels [D / 16, keys / 2, 16, 2].

    Of `num_keys` in all; `values` 0 is zeros.
    """
    panel_bytes = num_keys // 2 * _ROW_BYTES
    if values and first % 2 == 0 and count % 2 == 0:
        for j in range(0, count, 2):
            row = panels + (first + j) // 2 * _ROW_BYTES
            for panel in range(head_dim // PANEL):
                at = values + (j * head_dim + panel * PANEL) * 2
                _pair(at, at + head_dim * 2, row + panel * panel_bytes)
        return
    for j in range(count):
        row = panels + (first + j) // 2 * _ROW_BYTES + (first + j) % 2 * 2
        for panel in range(head_dim // PANEL):
            target = shorts_at(row + panel * panel_bytes)
            if values == 0:
                for d in range(PANEL):
                    target[2 * d] = 0
            else:
                source = shorts_at(values + (j * head_dim + panel * PANEL) * 2)
                for d in range(PANEL):
                    target[2 * d] = source[d]


@instruction(types.void, *[types.int64] * 3)
def _turn(b: ir.IRBuilder, source: Any, stride: Any, target: Any) -> None:
    """Write PANEL rows of as many pairs, `stride` bytes apart, as columns of the same size."""
    rows = [_load(b, b.add(source, b.mul(stride, i64(row))), _PAIRS) for row in range(PANEL)]
    # Four rounds in each of which two rows become two that hold every other run of both.
    width = PANEL // 2
    while width:
        low = [lane if lane & width == 0 else lane - width + PANEL for lane in range(PANEL)]
        high = [lane + width if lane & width == 0 else lane + PANEL for lane in range(PANEL)]
        for row in range(PANEL):
            if row & width == 0:
                pair = rows[row], rows[row + width]
                rows[row], rows[row + width] = (_mixed(b, *pair, lanes) for lanes in (low, high))
        width //= 2
    for row, turned in enumerate(rows):
        _store(b, turned, b.add(target, i64(row * _ROW_BYTES)))


@instruction(types.void, *[types.int64] * 3)
def _pair(b: ir.IRBuilder, first: Any, second: Any, target: Any) -> None:
    """Write PANEL numbers of 16 bits from two addresses by turns."""
    lanes = [lane // 2 + lane % 2 * PANEL for lane in range(2 * PANEL)]
    _store(b, _mixed(b, _load(b, first, _SHORTS), _load(b, second, _SHORTS), lanes), target)


def _load(b: ir.IRBuilder, address: Any, kind: ir.Type) -> Any:
    return b.load(b.inttoptr(address, kind.as_pointer()), align=2)


def _store(b: ir.IRBuilder, x: Any, address: Any) -> None:
    b.store(x, b.inttoptr(address, x.type.as_pointer()), align=4)


def _mixed(b: ir.IRBuilder, left: Any, right: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


@inner
def multiply(
    has_tiles: int,
    rows: int,
    x: int,
    x_stride: int,
    depth: int,
    panels: int,
    columns: int,
    y: int,
    y_stride: int,
    is_added: int,
) -> None:
    """Make y [rows, columns] = x [rows, depth] w, plus what y was if `is_added`.

    x is bfloat16, y float32; depth and columns are multiples of 32.  Rows are computed up to a
    multiple of ROWS_TOGETHER, whatever lies there.
    """
    num_panels, num_steps = columns // PANEL, depth // STEP
    panel_bytes = num_steps * STEP_BYTES
    if has_tiles == 0:
        for panel in range(num_panels):
            w, to = panels + panel * panel_bytes, y + panel * PANEL * 4
            for row in range(0, rows, _FEW):
                at, sums = x + row * x_stride, to + row * y_stride
                _by_vectors(w, at, x_stride, sums, y_stride, num_steps, rows - row, is_added)
        return
    for row in range(0, rows, ROWS_TOGETHER):
        at, to = x + row * x_stride, y + row * y_stride
        for panel in range(0, num_panels, 2):
            w, sums = panels + panel * panel_bytes, to + panel * PANEL * 4
            if rows - row > TILE_ROWS:
                _two_tiles(w, at, x_stride, sums, y_stride, num_steps, is_added, panel_bytes, 0)
            else:
                _one_tile(w, at, x_stride, sums, y_stride, num_steps, is_added, panel_bytes, 0)
