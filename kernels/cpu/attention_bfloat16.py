"""What attention of many queries is made of in bfloat16: panels of keys and values, products.

Keys and values of a tile are gathered once for all rows of a work item, into panels of pairs (see
`kernels.cpu.amx`): pairs along a head for the scores, pairs along the keys for the sums.  Scores,
totals and sums are float32; queries and weights are rounded to bfloat16 before a product.
"""

from __future__ import annotations

from kernels.cpu import amx
from kernels.cpu.amx import STEP, STEP_BYTES, TILE_ROWS
from kernels.cpu.intrinsics import ints_at, shorts_at
from kernels.cpu.rows_bfloat16 import LONG_TILE
from kernels.cpu.simd import PANEL, pair_product
from kernels.cpu.tasks import inner

# Rows are computed up to whole ones of these.
ROWS_TOGETHER = 2 * TILE_ROWS
_PAIR_BYTES = 4
_FEW = 3

_two_tiles, _one_tile = amx.tile_product(2, 2), amx.tile_product(1, 2)
_by_vectors = pair_product(_FEW)


@inner
def turn_keys(keys: int, count: int, first: int, head_dim: int, panels: int) -> None:
    """Put keys that lie in a row, the `first` and so on, into panels [tile / 16, D / 2, 16, 2]."""
    pairs = head_dim // 2
    for j in range(count):
        key = first + j
        source = ints_at(keys + j * head_dim * 2)
        target = ints_at(panels + (key // PANEL * pairs * PANEL + key % PANEL) * _PAIR_BYTES)
        for pair in range(pairs):
            target[pair * PANEL] = source[pair]


@inner
def pair_values(values: int, count: int, first: int, head_dim: int, panels: int) -> None:
    """Put values that lie in a row into panels [D / 16, tile / 2, 16, 2]; zeros for address 0."""
    for j in range(count):
        row = panels + (first + j) // 2 * PANEL * _PAIR_BYTES + (first + j) % 2 * 2
        for panel in range(head_dim // PANEL):
            target = shorts_at(row + panel * (LONG_TILE // 2) * PANEL * _PAIR_BYTES)
            if values == 0:
                for d in range(PANEL):
                    target[2 * d] = 0
            else:
                source = shorts_at(values + (j * head_dim + panel * PANEL) * 2)
                for d in range(PANEL):
                    target[2 * d] = source[d]


@inner
def multiply(
    has_tiles: int,
    rows: int,
    x: int,
    depth: int,
    panels: int,
    columns: int,
    y: int,
    is_added: int,
) -> None:
    """Make y [rows, columns] = x [rows, depth] w, plus what y was if `is_added`.

    x is bfloat16, y float32, both contiguous; depth and columns are multiples of 32.  Rows are
    computed up to a multiple of ROWS_TOGETHER, whatever lies there.
    """
    x_stride, y_stride = depth * 2, columns * 4
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
