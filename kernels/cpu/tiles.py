"""Multiplies any number of rows by panels in tiles, prefetching the next weights.

32 rows meet two panels in registers, 16 rows or fewer up to four.  Memory is slower than tiles: so
that it is never idle, the first few lots of rows each ask for a part of what comes next.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.cpu import amx
from kernels.cpu.amx import ROW_BYTES, STEP_BYTES, TILE_ROWS
from kernels.cpu.tasks import inner

# Rows that meet two panels at a time.
TWO_TILES = 2 * TILE_ROWS


@inner
def num_together(rows: int, panels: int) -> int:
    """Return how many of so many panels meet the rows at a time."""
    if panels >= 4 and rows <= TILE_ROWS:
        return 4
    return 2 if panels >= 2 else 1


def rows_product(*, of_bytes: bool) -> Callable[..., None]:
    """Return y[r, p, :16] = sum over k of x[r, k] w[p, k, :16], plus what y was, by tiles.

    The function takes (num_panels, w, x, x_stride, y, y_stride, rows, num_steps, near, is_added,
    later): as many panels as `num_together` says, and otherwise what `amx.tile_product` takes.  The
    rows are some whole lots of 32, or one that is not; `amx.configure` has been told which.  Of
    several lots it takes `near` steps at a time: their weights stay in the first cache meanwhile.
    """
    one_tile, two_tiles = _one_tile(of_bytes=of_bytes), _two_tiles(of_bytes=of_bytes)

    @inner
    def product(num_panels: int, *operands: int) -> None:
        w, x, x_stride, y, y_stride, rows, num_steps, near, is_added, later = operands
        panel_bytes = num_steps * STEP_BYTES
        lots = -(-rows // TWO_TILES)
        parts = 4 if lots >= 4 else 2 if lots >= 2 else 1
        # One lot meets each weight once, in the order in which memory has them.
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
    asking_none, asking_all, asking_half, asking_quarter = (
        amx.tile_product(2, 2, prefetch=part, of_bytes=of_bytes) for part in (0, 1, 2, 4)
    )

    @inner
    def product(num_panels: int, parts: int, operands: tuple[int, ...]) -> None:
        if num_panels == 1:
            by_one(*operands)
        elif parts == 0:
            asking_none(*operands)
        elif parts == 1:
            asking_all(*operands)
        elif parts == 2:
            asking_half(*operands)
        else:
            asking_quarter(*operands)

    return product
