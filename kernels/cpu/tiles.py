"""Multiply any number of rows by panels in tiles, and prefetch the next weights.

Rows are taken in lots of 32, which are multiplied with two panels in registers; a lot of 16 rows or
fewer is multiplied with up to four.  Memory is slower than tiles: so that it is never idle, each of
the first few lots prefetches a part of the next weights.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.cpu import amx
from kernels.cpu.amx import ROW_BYTES, STEP_BYTES, TILE_ROWS
from kernels.cpu.tasks import inner

# Rows of a lot.
TWO_TILES = 2 * TILE_ROWS


@inner
def num_together(rows: int, panels: int) -> int:
    """Return how many of these panels are multiplied with the rows at a time."""
    if panels >= 4 and rows <= TILE_ROWS:
        return 4
    return 2 if panels >= 2 else 1


def rows_product(*, of_bytes: bool) -> Callable[..., None]:
    """Return a function that computes y[r, p, :16] = sum over k of x[r, k] w[p, k, :16] by tiles.

    The function takes (num_panels, w, x, x_stride, y, y_stride, rows, num_steps, near, is_added,
    later): as many panels as `num_together` returns, otherwise the arguments of `amx.tile_product`.
    The rows are whole lots of 32, or one smaller lot, as set by `amx.configure`.  Several lots are
    multiplied `near` steps at a time, whose weights stay in the L1 cache.
    """
    one_tile, two_tiles = _one_tile(of_bytes=of_bytes), _two_tiles(of_bytes=of_bytes)

    @inner
    def product(num_panels: int, *operands: int) -> None:
        w, x, x_stride, y, y_stride, rows, num_steps, near, is_added, later = operands
        panel_bytes = num_steps * STEP_BYTES
        lots = -(-rows // TWO_TILES)
        parts = 4 if lots >= 4 else 2 if lots >= 2 else 1
        # One lot reads each weight once, in the order of memory.
        together = near if lots > 1 else num_steps
        for step in range(0, num_steps, together):
            steps, start = min(together, num_steps - step), step * STEP_BYTES
            has_sums = step or is_added
            for lot in range(lots):
                row = lot * TWO_TILES
                coming = later + start + lot * steps * (STEP_BYTES // parts)
                lines = (x + row * x_stride + step * ROW_BYTES, x_stride)
                sums = (y + row * y_stride, y_stride)
                of_lot = (w + start, *lines, *sums, steps, has_sums, panel_bytes, coming)
                if rows <= TILE_ROWS:
                    one_tile(num_panels, of_lot)
                else:
                    two_tiles(num_panels, parts if lot < parts else 0, of_lot)

    return product


def _one_tile(*, of_bytes: bool) -> Callable[..., None]:
    by_one, by_two, by_four = (
        amx.tile_product(1, panels, prefetch=1, of_bytes=of_bytes) for panels in (1, 2, 4)
    )

    @inner
    def product(num_panels: int, operands: tuple[int, ...]) -> None:
        if num_panels == 4:
            by_four(*operands)
        elif num_panels == 2:
            by_two(*operands)
        else:
            by_one(*operands)

    return product


def _two_tiles(*, of_bytes: bool) -> Callable[..., None]:
    by_one = amx.tile_product(2, 1, prefetch=1, of_bytes=of_bytes)
    prefetch_none, prefetch_all, prefetch_half, prefetch_quarter = (
        amx.tile_product(2, 2, prefetch=part, of_bytes=of_bytes) for part in (0, 1, 2, 4)
    )

    @inner
    def product(num_panels: int, parts: int, operands: tuple[int, ...]) -> None:
        if num_panels == 1:
            by_one(*operands)
        elif parts == 0:
            prefetch_none(*operands)
        elif parts == 1:
            prefetch_all(*operands)
        elif parts == 2:
            prefetch_half(*operands)
        else:
            prefetch_quarter(*operands)

    return product
